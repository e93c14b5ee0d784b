"""Under FSDP, the head at asked positions gives what it gives on one device. Two processes on the CPU."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

CODE = """
    import sys
    sys.path.insert(0, sys.argv[1])
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from toys import toy_model
    from diffusers_text import logits_at

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for conditioning in ("none", "layerwise", "prefix"):
        model, whole = (toy_model(time_conditioning=conditioning) for _ in range(2))
        for layer in model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ids = torch.randint(5, 8, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
        inputs = {"input_ids": ids, "positions": torch.tensor([1, 4, 10])}
        if conditioning != "none":
            inputs["timesteps"] = torch.tensor([0.3, 0.6])
        logits, expected = logits_at(model, **inputs), logits_at(whole, **inputs)
        torch.testing.assert_close(logits, expected)
        for own in (logits, expected):
            own.square().sum().backward()
        for sharded, parameter in zip(model.parameters(), whole.parameters(), strict=True):
            dist.all_reduce(parameter.grad)
            torch.testing.assert_close(sharded.grad.full_tensor(), parameter.grad / 2)
    print("equal")
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_sparse_logits_and_gradients_of_a_sharded_model_are_those_of_a_whole_one(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(textwrap.dedent(CODE))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    done = subprocess.run(
        [*command, str(script), str(Path(__file__).parents[1])], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2

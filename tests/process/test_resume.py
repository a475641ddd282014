"""A training that is stopped and resumed has the same bits as one that goes on, if its buckets are the same."""

import io
import pickle

import pytest
import torch

import commlayer
from tests import ranks
from tests.drift import directions, hooked, step_of
from tests.residual import same_bits, saved

CODECS = ["int8", "int4", "sign", "powersgd:2", "topk:0.05"]


@pytest.mark.parametrize("codec", CODECS)
@ranks.on(2, ranks.run_job, environ=ranks.NETWORK)
def test_a_restored_state_goes_on_with_the_same_bits(rank: int, size: int, codec: str) -> None:
    policy = commlayer.Policy(codec=codec, deterministic=True)
    model, state = hooked(policy, finds_unused=True, bucket_cap_mb=0.1)
    for step in range(3):
        step_of(model, directions(rank, step))
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    again, restored = hooked(commlayer.Policy(), finds_unused=True, bucket_cap_mb=0.1)
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert same_bits(saved(restored), saved(state))
    assert bool(saved(state)) == (codec != "int8")
    for step in range(3, 6):
        assert same_bits(step_of(model, directions(rank, step)), step_of(again, directions(rank, step)))
    assert same_bits(saved(restored), saved(state))
    assert state._buckets == 2


@pytest.mark.parametrize("environ", [ranks.NETWORK, {"COMMLAYER_SHM": "1"}], ids=["network", "one host"])
@ranks.on(3, ranks.run_job, environ="environ")
def test_without_a_codec_a_restored_training_needs_no_step_before(rank: int, size: int) -> None:
    policy = commlayer.Policy(deterministic=True)
    (model, _), (restored, _) = (hooked(policy, bucket_cap_mb=0.1) for _ in range(2))
    for step in range(3):
        step_of(model, directions(rank, step))
    for step in range(3, 6):
        assert same_bits(step_of(model, directions(rank, step)), step_of(restored, directions(rank, step)))


@pytest.mark.parametrize("codec", CODECS)
@ranks.on(3, ranks.run_job, environ=ranks.NETWORK)
def test_a_step_before_the_restore_gives_ddp_its_buckets(rank: int, size: int, codec: str) -> None:
    """DDP regroups its buckets after the first backward pass of a process. Restored after that, all bits are the same;
    restored before, the first step encodes other buckets."""
    policy = commlayer.Policy(codec=codec, deterministic=True)
    (model, state), (warm, restored), (cold, early) = (hooked(policy, bucket_cap_mb=0.1) for _ in range(3))
    for step in range(3):
        step_of(model, directions(rank, step))
    kept = pickle.dumps(state.state_dict())
    step_of(warm, directions(rank, 7))
    restored.load_state_dict(pickle.loads(kept))
    early.load_state_dict(pickle.loads(kept))
    firsts = []
    for step in range(3, 6):
        expected = step_of(model, directions(rank, step))
        assert same_bits(expected, step_of(warm, directions(rank, step)))
        firsts.append(same_bits(expected, step_of(cold, directions(rank, step))))
    assert same_bits(saved(restored), saved(state))
    assert not firsts[0]

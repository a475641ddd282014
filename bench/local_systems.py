"""The systems that bench.local_steps times: DDP on gloo and on commlayer's hook, local steps, and those of torch."""

from __future__ import annotations

from typing import Any

from bench.jobs import training
from bench.jobs.local_steps import Job
from bench.jobs.torchft_sites import DILOCO, LOCAL_SGD

SPEEDS, STALLS, EXACT, TORCHFT = "speeds", "stalls", "exact", "torchft"
SPECIAL = {
    SPEEDS: ", one of half the speed",
    STALLS: ", one that stalls",
    EXACT: ", where auto stays exact",
    TORCHFT: ", beside torchft",
}
"""Cases whose tables have columns of their own, and the ends of the names of their networks."""
TRAINING = "Training, "
"""The beginning of the names of networks with trainings."""
ALONE, HOOK, LOCAL_AUTO = "computation alone", "hook", "local, auto"
AUTO, STATE = f"{HOOK}, auto", f"{HOOK}, auto with state"
LOCAL_CODEC = f"{LOCAL_AUTO}, with the hook's auto"
"""`every="auto"` whose exact steps have the policy of the hook: where H is 1, its steps are those of the hook."""
EVERY = (1, 4, 8, 16, 32, 64)
PERIODS = (8, 16, 32)
STEADY: dict[str, Any] = {"warm_up": 22, "steps": 24}
"""Of all that have the hook's `auto`, which has tried its candidates by then. Some later steps are trials of other
codecs: a shorter window may have none of them."""


def name_of(every: int) -> str:
    return f"local, H {every}"


def jobs_of() -> list[Job]:
    """All systems."""
    return [
        Job(ALONE, is_alone=True),
        Job("gloo, cubic f32", "gloo", "cubic", warm_up=3, steps=4),
        *(Job(f"gloo, {cc} bf16", "gloo", cc, "bf16", warm_up=3) for cc in ("cubic", "bbr")),
        Job(AUTO, policy={"codec": "auto"}, **STEADY),
        Job(STATE, policy={"codec": "auto", "allow_state": True, "exact_steps": 3}, **STEADY),
        Job(LOCAL_AUTO, local={"every": "auto"}, warm_up=8, steps=24),
        Job(LOCAL_CODEC, policy={"codec": "auto"}, local={"every": "auto"}, **STEADY),
        *(Job(name_of(h), local={"every": h, "fragments": min(4, h)}, warm_up=1, steps=24) for h in EVERY),
        *(Job(f"LocalSGD on gloo, H {h}", "gloo", "cubic", period=h, warm_up=1, steps=2 * h) for h in PERIODS),
    ]


def jobs_of_two() -> list[Job]:
    """The systems of the sites of two ranks."""
    common: dict[str, Any] = {"step_s": 0.28, "ranks_per_host": 2}
    return [
        Job(ALONE, is_alone=True, **common),
        Job(LOCAL_AUTO, local={"every": "auto"}, warm_up=100, steps=24, **common),
        *(Job(name_of(h), local={"every": h}, warm_up=1, steps=24, **common) for h in (8, 32)),
    ]


def jobs_of_pair() -> list[Job]:
    """The systems of two sites: an average is one exchange there."""
    left = {ALONE, "gloo, cubic bf16", "gloo, bbr bf16", AUTO, STATE, LOCAL_AUTO, *map(name_of, (4, 8, 16))}
    return [job for job in jobs_of() if job.system in left]


EQUAL, UNEVEN = "equal steps", "uneven steps"


def jobs_of_speeds() -> list[Job]:
    """Sites of which one has half the speed of the others: all make as many steps, or each as many as it can."""
    given: dict[str, Any] = {"speeds": (1.0, 1.0, 1.0, 0.5), "steps": 192, "warm_up": 12}
    return [
        Job(EQUAL, local={"every": 24, "outer": (1.0, 0.0)}, **given),
        Job(UNEVEN, local={"every": 24, "outer": (1.0, 0.0), "uneven": True}, **given),
    ]


LEVEL, WAITING, QUORUM = "no stalls", "stalls, all wait", "stalls, quorum of 3"


def jobs_of_stalls() -> list[Job]:
    """Sites of which the last one stalls: the others wait for it, or do not. Without stalls a quorum costs nothing."""
    given: dict[str, Any] = {"is_free": True, "steps": 960, "warm_up": 60}
    usual: dict[str, Any] = {"every": 24}
    return [
        Job(LEVEL, local={**usual, "quorum": 3}, **given),
        Job(WAITING, local=usual, stall_s=2.0, **given),
        Job(QUORUM, local={**usual, "quorum": 3}, stall_s=2.0, **given),
    ]


def jobs_of_exact() -> list[Job]:
    """Pairs with the same codec: the hook, and `every="auto"` where it stays exact."""
    jobs = []
    for title, codec in (("float32", "none"), ("bf16", "bf16")):
        common: dict[str, Any] = {"policy": {"codec": codec}, "steps": 24}
        jobs.append(Job(f"hook, {title}", warm_up=4, **common))
        jobs.append(Job(f"{LOCAL_AUTO}, {title}", local={"every": "auto"}, warm_up=8, **common))
    return jobs


def jobs_of_torchft() -> list[Job]:
    """Local steps beside those of torchft on gloo, with the same H."""
    kinds = [(h, kind) for h in PERIODS for kind in (DILOCO, LOCAL_SGD)]
    return [
        Job(ALONE, is_alone=True),
        *(Job(name_of(h), local={"every": h, "fragments": 4}, warm_up=1, steps=24) for h in PERIODS),
        *(
            Job(f"torchft, {kind}, H {h}", "gloo", "cubic", period=h, torchft=kind, warm_up=1, steps=2 * h)
            for h, kind in kinds
        ),
    ]


TRAINED: dict[str, Any] = {"width": 48, "layers": 2, "heads": 4, "context": 32, "batch": 4, "learning_rate": 1e-2}
TRAINED |= {"validate_every": 250, "validation_batch": 512}
TRAINED_STEPS, LOCAL_STEPS = 1500, 2000


def trainings() -> list[training.Job]:
    """The systems that train end to end."""
    state = {"codec": "auto", "allow_state": True, "exact_steps": 8}
    exact: dict[str, Any] = {**TRAINED, "steps": TRAINED_STEPS}
    return [
        training.Job("gloo, cubic bf16", "gloo", "cubic", "bf16", **exact),  # the best by the table of steps at 20
        training.Job(AUTO, policy={"codec": "auto"}, **exact),
        training.Job(STATE, policy=state, **exact),
        *(
            training.Job(name_of(h), local={"every": h, "exact_steps": 100}, steps=LOCAL_STEPS, **TRAINED)
            for h in (8, 16)
        ),
    ]

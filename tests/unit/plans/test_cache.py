import weakref

from commlayer.plans import delivery
from commlayer.plans.cache import PLAN_BYTES, PlanCache
from commlayer.plans.plan import STEP, Plan


def plan(steps: int) -> Plan:
    """One that sends so many messages."""
    made = delivery.deliver(0, tuple((rank,) for rank in range(steps + 1)), [0, *[1] * steps], [None] * (steps + 1), 0)
    assert len(made.steps) == steps
    return made


def test_a_plan_is_made_once() -> None:
    cache = PlanCache()
    first = cache.get("a", lambda: plan(3))
    assert cache.get("a", lambda: plan(3)) is first
    assert cache.get("b", lambda: plan(3)) is not first
    assert len(cache) == 2


def test_the_oldest_make_room() -> None:
    cache = PlanCache(limit_bytes=3 * PLAN_BYTES + 10 * STEP.itemsize)
    kept = {size: cache.get(size, lambda size=size: plan(size)) for size in (4, 5)}  # type: ignore[misc]
    cache.get(3, lambda: plan(3))
    assert cache.get(5, lambda: plan(5)) is kept[5]
    assert cache.get(4, lambda: plan(4)) is not kept[4]
    large = cache.get(500, lambda: plan(500))
    assert len(cache) == 1
    assert cache.get(500, lambda: plan(500)) is large


def test_plans_without_steps_are_bounded_too() -> None:
    cache = PlanCache(limit_bytes=10 * PLAN_BYTES)
    for key in range(100):
        cache.get(key, lambda: plan(0))
    assert len(cache) == 10


def test_plans_that_are_forgotten_are_freed() -> None:
    cache = PlanCache(limit_bytes=PLAN_BYTES)
    seen = weakref.ref(cache.get("a", lambda: plan(1)))
    cache.get("b", lambda: plan(1))
    assert seen() is None

"""`summarize`: the samples of all ranks as one view of the job: sums, the slowest peer, dead paths, silent ranks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

SILENT_S = 5.0
"""A rank whose latest sample is older is called silent."""

CURVES = (
    "step_s",
    "exposed_step_s",
    "late_step_s",
    "exposed_share",
    "sent_bytes_s",
    "shared_bytes_s",
    "loss",
    "retransmitted",
    "forgiven_bytes",
    "queue_us",
)
"""The sums of the job that are shown over time."""


def summarize(view: dict[str, Any]) -> dict[str, Any]:
    """The view of a job, from the answer of its collector: `job` has the sums, `ranks` the samples by rank."""
    ranks = sorted(view["samples"], key=lambda sample: int(sample["rank"]))
    ended = set(view["ended"])
    for rank in ranks:
        rank["age_s"] = view["ages"].get(str(rank["rank"]), 0.0)
        rank["state"] = "ended" if rank["rank"] in ended else "silent" if rank["age_s"] > SILENT_S else "live"
    live = [rank for rank in ranks if rank["state"] == "live"]
    world = max((rank["world"] for rank in ranks), default=0)
    heard = {rank["rank"] for rank in ranks}
    return {
        "job": {
            "time": max((rank["time"] for rank in ranks), default=0.0),
            "world": world,
            "live": len(live),
            "unheard": sorted(set(range(world)) - heard),
            "silent": [rank["rank"] for rank in ranks if rank["state"] == "silent"],
            "ended": sorted(ended),
            "paused": sorted({name for row in live for name in row["paused"]}),
            **_sums(live),
            "slowest": slowest(live),
            "dead_paths": dead_paths(live),
        },
        "ranks": ranks,
    }


def _sums(live: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums and medians over ranks that send samples."""
    steps = [row["step_s"] for row in live if row["step_s"]]
    late = [row["late_step_s"] for row in live if row["late_step_s"] is not None]
    exposed = [row["exposed_step_s"] for row in live if row["exposed_step_s"] is not None]
    sent, lost = sum(row["packets"] for row in live), sum(row["lost"] for row in live)
    hooks = [hook for row in live for hook in row["hooks"]]
    return {
        "step": max((row["step"] for row in live if row["step"] is not None), default=None),
        "step_s": statistics.median(steps) if steps else None,
        "exposed_step_s": statistics.median(exposed) if exposed else None,
        "late_step_s": statistics.median(late) if late else None,
        "exposed_share": statistics.median(map(exposed_share, live)) if live else 0.0,
        "late_share": statistics.median(map(late_share, live)) if live else 0.0,
        "sent_bytes_s": sum(row["sent_bytes_s"] for row in live),
        "received_bytes_s": sum(row["received_bytes_s"] for row in live),
        "shared_bytes_s": sum(row["shared_bytes_s"] for row in live),
        "packets": sent,
        "lost": lost,
        "loss": lost / sent if sent else 0.0,
        "retransmitted": sum(row["retransmitted"] for row in live),
        "forgiven_bytes": sum(row["forgiven_bytes"] for row in live),
        "uncounted_bytes": sum(hook["uncounted_bytes"] for hook in hooks),
        "queue_us": max((row["queue_us"] for row in live), default=0),
        "policies": sorted({f"{hook['codec']}, loss bound {hook['loss_bound']:g}" for hook in hooks}),
    }


def exposed_share(sample: dict[str, Any]) -> float:
    """The share of the time in which the training of a rank waited for communication: of its steps, if it has some."""
    return _share(sample, "exposed")


def late_share(sample: dict[str, Any]) -> float:
    """The part of this share in which it waited for ranks that were late."""
    return _share(sample, "late")


def _share(sample: dict[str, Any], what: str) -> float:
    part, whole = (f"{what}_step_s", "step_s") if sample["step_s"] else (f"{what}_s", "interval_s")
    return min(1.0, float(sample[part]) / max(float(sample[whole]), 1e-9))


def slowest(live: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The rank that the others have waited for longest, less its own waiting: a rank that waits for the slowest one is
    late, too. With its host, the number of waiting ranks, and the mean share of their time; None if nobody waited."""
    waits: dict[int, list[float]] = {}
    for row in live:
        for peer, waited_us in row["lags"]:
            waits.setdefault(peer, []).append(waited_us / 1e6 / max(row["lags_s"], 1e-9))
    if not waits:
        return None
    own = {row["rank"]: sum(us for _, us in row["lags"]) / 1e6 / max(row["lags_s"], 1e-9) for row in live}
    rank = max(waits, key=lambda peer: sum(waits[peer]) - own.get(peer, 0.0))
    host = next((row["host"] for row in live if row["rank"] == rank), "")
    return {"rank": rank, "host": host, "waiting": len(waits[rank]), "share": min(1.0, statistics.mean(waits[rank]))}


def dead_paths(live: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The paths on which nothing arrives, of those that the samples name."""
    return [
        {"rank": row["rank"], "peer": path["peer"], "interface": path["interface"], "remote": path["remote"]}
        for row in live
        for path in row["paths"]
        if path["dead"]
    ]

"""`Options`: the policy of a group, as `pg_options`."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Backend

from commlayer_environment import NAME as NAME

from ...config import Policy
from ...errors import ConfigError


class Options(Backend.Options):
    """Gives a group its policy: pass it as `pg_options=`, or in a DeviceMesh's `backend_override`.

    Raises ConfigError unless `policy` is a Policy or None.
    """

    def __init__(self, policy: Policy | None = None, *, timeout: timedelta = timedelta(minutes=30)) -> None:
        super().__init__(NAME, timeout)
        if not isinstance(policy, (Policy, type(None))):
            raise ConfigError(f"Options({policy!r}): pass a policy, as Options(Policy(loss_bound=0.01)), or nothing")
        self.policy = policy or Policy()
        """The policy of all operations of the group."""
        if self.policy.codec != "none":
            raise ConfigError(
                f"Options(Policy(codec={self.policy.codec!r})): on a whole group, a codec would round counters and "
                f"metrics, too; give the policy to a HookState or to compress_fsdp"
            )

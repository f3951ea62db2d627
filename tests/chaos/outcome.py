"""What a run has brought: the history, what is wrong with it, and a report for people."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from dflockd.sharding import stable_hash_shard
from tests.chaos import timeline
from tests.chaos.checker import first_grants, over_restarts, undelivered
from tests.chaos.history import Event
from tests.chaos.losses import Loss, losses
from tests.chaos.options import Options
from tests.chaos.story import Finding


@dataclass
class Outcome:
    """What a run has brought."""

    options: Options
    events: list[Event]
    findings: list[Finding]
    complaints: list[str] = field(default_factory=list)
    """What was wrong beside: processes that hang, errors in the servers' logs."""

    @property
    def first(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    def count(self, what: str) -> int:
        return sum(event.what == what for event in self.events)

    def _server_of(self, key: str) -> str:
        return f"server-{stable_hash_shard(key, self.options.servers)}"

    @property
    def losses(self) -> list[Loss]:
        """The locks that holders of a cluster have lost."""
        parameters = self.options.parameters
        return losses(self.events, parameters, self.options.lease) if parameters is not None else []

    @property
    def unexplained(self) -> list[str]:
        """Losses of holders who had a server to ask in time, as far as one can tell."""
        return [
            f"{loss.event.who} lost {loss.event.key} at {loss.event.at}, with {loss.free:.1f} s to "
            f"renew it; around it: {', '.join(loss.reasons) or 'nothing'}"
            for loss in self.losses
            if not loss.is_explained
        ]

    def _losses(self) -> list[str]:
        causes = Counter(
            " + ".join(sorted({reason.split()[0] for reason in loss.reasons}))
            for loss in self.losses
            if loss.is_explained
        )
        found = [f"    {number} for {cause}" for cause, number in causes.most_common()]
        return [*found, *(f"    UNEXPLAINED: {text}" for text in self.unexplained)]

    def report(self) -> str:
        """All figures, and the first finding with its picture."""
        options = self.options
        kinds = Counter(e.detail.split()[0] for e in self.events if e.what == "fault")
        found = Counter(finding.kind for finding in self.findings)
        is_cluster = options.parameters is not None
        times = [] if is_cluster else first_grants(self.events, self._server_of)
        lines = [
            f"seed {options.seed}, {options.seconds:g} s, {options.servers} servers, "
            f"{options.workers} workers, {options.clients} clients, {options.keys} keys, "
            f"leases of {options.lease} s, "
            + (
                f"a cluster, serving leases of {options.serving_lease} s"
                if is_cluster
                else f"{'with' if options.state_dir else 'without'} state directory"
            ),
            f"  faults                   {kinds.total()}",
            *(f"    {kind:22} {number}" for kind, number in sorted(kinds.items())),
            f"  critical sections        {self.count('begin')}",
            *(
                []
                if is_cluster
                else [f"  held over a restart      {over_restarts(self.events, self._server_of)}"]
            ),
            f"  grants                   {self.count('granted')}",
            f"  tasks sent               {self.count('sent')}",
            f"  tasks lost by the broker {len(undelivered(self.events))}",
            f"  tasks run                {self.count('started')}",
            f"  tasks requeued           {self.count('requeued')}",
            f"  locks lost by holders    {self.count('lost')}",
            *self._losses(),
            f"  writes accepted          {self.count('accepted')}",
            f"  stale writes refused     {self.count('refused')}",
        ]
        if times:
            lines.append(
                f"  restart to first grant   median {statistics.median(times):.3f} s, "
                f"worst {max(times):.3f} s, of {len(times)}"
            )
        lines.append(f"  findings                 {len(self.findings)}")
        for kind in KINDS_OF_FINDINGS:
            lines.append(f"    {kind:28} {found.pop(kind, 0)}")
        lines += [f"    {kind:28} {number}" for kind, number in found.items()]
        lines += self.complaints
        if self.first is not None:
            lines += ["", *(timeline.pictures(self.events, self.first)[0]).splitlines()]
        return "\n".join(lines)


KINDS_OF_FINDINGS = (
    "overlap",
    "overlap of a tenant",
    "too many starts",
    "the newest lost",
    "sent twice",
    "fence order",
    "not first come, first served",
    "lost within its lease",
    "lost waiter",
    "lost task",
    "double run",
    "stale write accepted",
)

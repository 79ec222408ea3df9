"""Server count: edits of the wikis of Wikimedia, by server. Few keys, and some very large maps.

For each server: edits, bytes added, and how often each of its users has edited. A few servers have
most of the edits, and hundreds of thousands of users each, in one map.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from statekit.engine.job import Job, KeyedOperator
from statekit.engine.workloads.base import DUE, Workload, in_order, repeats
from statekit.engine.workloads.draws import Ranks, below, uniform
from statekit.engine.workloads.pace import source_of

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider


class ServerCount(Workload, frozen=True, kw_only=True):
    name: ClassVar[str] = "server_count"
    stage: ClassVar[str] = "servers"
    key: ClassVar[str] = "server"

    servers: int = 1000
    users: int = 1_000_000  # of the largest server; the n-th has an n-th of them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.servers < 1 or self.users < 1:
            raise ValueError("pass servers >= 1 and users >= 1")

    def events(self, numbers: Any) -> dict[str, Any]:
        ranks = Ranks(self.servers, 1.3).of(self.seed, numbers, 0)
        users = np.maximum(self.users // (ranks + 1), 1)
        # The n-th user has 1 / n of the edits, or nearly so: this needs no table for each server.
        user = np.floor((users + 1) ** uniform(self.seed, numbers, 1)).astype(np.int64)
        return {
            "server": [f"w{rank}.wikipedia.org" for rank in ranks.tolist()],
            "user": [f"user-{one}" for one in user.tolist()],
            "added": below(self.seed, numbers, 2, 4000) - 500,
            "seq": numbers,
        }

    def job(self, folder: "str | Path") -> Job:
        return (
            Job(self.name)
            .source(self.read(folder), parallelism=self.sources)
            .key_by("server")
            .process(_Servers, parallelism=self.workers, name=self.stage)
            .sink(folder, due=DUE)
        )

    def wrong(self, results: pa.Table, records: int) -> str:
        seq = results["seq"].to_numpy()
        if fault := repeats(seq, records):
            return fault
        events = self.events(np.arange(records))
        by_event = results.sort_by("seq")
        for name in ("server", "user"):
            if by_event[name].to_pylist() != events[name]:
                return f"the {name}s of events are not those of the generator"
        senders = source_of(np.arange(records), self.rows, self.sources)
        servers = np.array(events["server"])
        pairs = np.array([f"{a} {b}" for a, b in zip(servers, events["user"], strict=True)])
        edits = by_event["edits"].to_numpy()
        for keys, counts in ((servers, edits), (pairs, by_event["of_user"].to_numpy())):
            if fault := in_order(keys, counts, np.arange(records), senders):
                return fault
        # In the order of its edits, what was added to a server is a running total.
        order = np.lexsort((edits, servers))
        added, total = events["added"][order], by_event["total"].to_numpy()[order]
        before = np.r_[0, total[:-1]] * (edits[order] > 1)
        if len(bad := np.flatnonzero(before + added != total)):
            return (
                f"{servers[order][bad[0]]}: the total of its edit {edits[order][bad[0]]} is wrong"
            )
        return ""


class _Servers(KeyedOperator):
    def open(self, kv: "KVProvider") -> None:
        self._edits = kv.value("edits", int, default=0)
        self._totals = kv.value("totals", int, default=0)
        self._users = kv.map("users", str, int)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        server = batch.column("server")
        edits = self._edits.add_many(server, returning=True)
        totals = self._totals.add_many(server, batch.column("added"), returning=True)
        assert edits is not None
        assert totals is not None
        of_user = []
        for one, user in zip(server.to_pylist(), batch.column("user").to_pylist(), strict=True):
            users = self._users[one]
            users[user] = count = users.get(user, 0) + 1
            of_user.append(count)
        return pa.record_batch(
            {
                "server": server, "user": batch.column("user"), "edits": edits.to_arrow(),
                "total": totals.to_arrow(), "of_user": of_user, "seq": batch.column("seq"),
                "due": batch.column("due"),
            }
        )  # fmt: skip

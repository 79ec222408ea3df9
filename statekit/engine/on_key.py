"""on_key: a function of one key as the operator of a stage. The same function runs on Spark.

    def visits(user, rows, st):                      # docs/spark.md, "The function"
        yield user, st.count.add(len(rows))

    job.key_by("user").process(on_key(visits, state={"count": int}, output=schema))

It is called once for each key of a batch: what a batch is, is the only difference. The states, the
rows and the checks of what it gives are those of a StatefulOp.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from statekit.engine.operators import KeyedOperator
from statekit.keys import key_type_text
from statekit.spark.cursor import (
    Cursor,
    Fired,
    Page,
    State,
    Timers,
    check_states,
    declare,
    make_cursor,
    set_key,
)
from statekit.spark.output import rows_to_table
from statekit.spark.rows import Grouped, Rows, column_of

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider

Function = Callable[[Any, Any, Any], Any]


def on_key(
    function: Function,
    *,
    state: Mapping[str, Any],
    output: pa.Schema,
    on_timer: Function | None = None,
) -> Callable[[], KeyedOperator]:
    """What process() takes: makes the operator of each task.

    state, on_timer: as in StatefulOp. output: the columns of the rows that the functions give.
    """
    states = check_states(state)
    return lambda: _OnKey(function, states, output, on_timer)


class _OnKey(KeyedOperator):
    def __init__(
        self,
        function: Function,
        states: Mapping[str, State | Timers],
        output: pa.Schema,
        on_timer: Function | None,
    ) -> None:
        self._function = function
        self._states = states
        self._output = output
        self._on_timer = on_timer
        self._time: int | None = None
        self._batches = 0

    def open(self, kv: "KVProvider") -> None:
        self._kv = kv
        declare(kv, self._states, key_type_text(self.key.type))

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        grouped = Grouped(pa.Table.from_batches([batch]), self.key.columns)
        bounds = grouped.bounds
        calls = [
            (key, Rows(grouped.columns, bounds[at], bounds[at + 1]), at)
            for at, key in enumerate(grouped.keys())
        ]
        return self._call(self._function, grouped.column, calls)

    def advance(self, time: int) -> pa.RecordBatch | None:
        """Calls on_timer for what is due, in the order of time. What that sets is for later."""
        self._time = time
        due = sorted(
            (timer.due, name, timer.key)
            for name, spec in self._states.items()
            if isinstance(spec, Timers)
            for timer in self._kv[name].pop_due(time)
        )
        if not due or self._on_timer is None:
            return None
        keys: dict[Any, int] = {}
        for _, _, key in due:
            keys.setdefault(key, len(keys))
        column = column_of([*keys], key_type_text(self.key.type))
        calls = [(key, Fired(name, at), keys[key]) for at, name, key in due]
        return self._call(self._on_timer, column, calls)

    def _call(
        self, function: Function, column: Any, calls: list[tuple[Any, Any, int]]
    ) -> pa.RecordBatch | None:
        """calls: the key, what the function is given with it, and where it is in the column."""
        cursor: Cursor = make_cursor(self._kv, self._states, self._time, self._batches)
        self._batches += 1
        cursor._turn(Page(column))
        made: list[Any] = []
        for key, given, at in calls:
            set_key(cursor, key)
            for cell in cursor._cells:
                cell._at = at
            try:
                if (rows := function(key, given, cursor)) is not None:
                    made.extend(rows)
            except Exception as error:
                error.add_note(f"This was {function.__name__} of key {key!r}.")
                raise
        cursor._flush()
        if not made:
            return None
        return rows_to_table(made, self._output).combine_chunks().to_batches()[0]

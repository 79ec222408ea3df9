"""A thin stream engine, to see the library do a real job: not a product. docs/engine.md

items.py     what travels in a channel: records, watermarks, barriers, marks, the end
sender.py    who gets what, and what is sent besides records when the routing changes
align.py     the order of records at a receiver, across moves and barriers
turns.py     barriers and moves take turns
records.py   records as Arrow batches: their key-groups, and who gets which
frames.py    items as bytes
channel.py   the sockets between tasks, bounded by credit
control.py   messages between the coordinator and its processes
job.py       what a user writes, and its plan
operators.py     what a keyed stage does
on_key.py    a function of one key as an operator: the one of StatefulOp
windows.py   windows of event time; event_time.py: the watermarks of a source
sources.py   files as a source; kafka.py: a topic; lines.py: a socket
loading.py   the job that a reference names, and settings.py: its knobs
collector.py     records that wait to be sent in larger batches
histogram.py     latencies, counted in buckets
workloads/   streams to measure with, each with its oracle
experiment/  strategies side by side
outputs.py   a sender with its sockets
task.py      a process: source, keyed task, sink
sink.py      result files, which appear with their checkpoint
checkpoints.py   a checkpoint of the whole job
strategies.py    how state goes over: one table
deployment.py    the processes of a job, and who has which key-groups
scaling.py       the steps of a rescale
coordinator.py   what is to happen, and when: checkpoints, rescales, recovery, the end
running.py   a job that runs, for programs
http.py      a job that runs, for curl

The first four are pure: no sockets, threads or clocks. tests/engine/ordering.py drives them.
"""

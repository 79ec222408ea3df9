"""Checkpoints of a provider in use.

checkpointer.py   full and incremental ones, while others write
job.py            one of them, as its user sees it
periodic.py       one every so many seconds
"""

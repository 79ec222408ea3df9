"""Plain values: what a state holds, read and written by its schema alone, without your classes.

A checkpoint says of every state what type it has (schema.py). That is enough to show a value to a
person, to put it into a file, and to turn what a person wrote into bytes. There are two styles:

    type                 "json": for people and scripts         "columns": for Arrow and Parquet
    int, bool, str, None as it is                               as it is
    float                as it is; "NaN", "Infinity", "-Infinity"   as it is
    bytes                "0x6162", hex digits                   bytes
    datetime             "2026-11-16T12:00:00+00:00"            aware datetime, or the same text
    date                 "2026-11-16"                           date, or the same text
    time, timedelta      "12:00:00", "PT1.5S" (ISO 8601)        time, timedelta, or the same text
    decimal              text                                   decimal(38, 18), or text
    uuid                 text                                   text
    list, tuple          array                                  list; tuple: {"0": ..., "1": ...}
    set                  array, sorted                          list, sorted
    dict                 object; keys as text, see keys.py      list of (key, value)
    dataclass, TypedDict object                                 dict
    NamedTuple           object, or an array by position        dict
    enum, Literal        its value                              its value
    T | None             null, or as T                          None, or as T
    Any, other unions    as JSON has it, with markers           that JSON as text
    timers               array of due times                     list of ints

A column has one type for all values, so it cannot hold every value of some types: a datetime
without a time zone, a time with one, a timedelta of 300,000 years, a Decimal with 20 places. Such a
value is a NoColumnError; all values of its type can be read as text instead (`text`). columns.py
makes Arrow columns of this style.

Inside an Any, markers stand for what JSON lacks: {"$bytes": "0x6162"}, {"$datetime": "..."},
{"$float": "NaN"}, {"$ext": [code, "0x.."]}, and {"$map": [[key, value], ...]} for a map whose keys
are not all text, or that looks like a marker. Keys: keys.py.

A field that is not stored is left out: it is newer than the value, and has a default. A field that
the schema does not have any more is not shown.

>>> schema = StateSchema("prefs", "map", "s", ["dict", "int", ["set", "str"]])
>>> codec = PlainCodec(schema)
>>> codec.write({"7": ["b", "a"]})
b'\\x81\\x07\\x82\\xa1b\\xc0\\xa1a\\xc0'
>>> codec.read(codec.write({"7": ["b", "a"]}))
{'7': ['a', 'b']}
>>> codec.write({"7": ["b", 5]})  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
statekit.errors.BadValueError: the value at $["7"][1] is 5, an int; expected is str...
"""

from statekit.render.codec import PlainCodec, has_column
from statekit.render.keys import key_from_json, key_json, key_text, parse_key, to_json
from statekit.render.wire import NoColumnError
from statekit.schema import StateSchema

__all__ = [
    "NoColumnError",
    "PlainCodec",
    "StateSchema",
    "has_column",
    "key_from_json",
    "key_json",
    "key_text",
    "parse_key",
    "to_json",
]

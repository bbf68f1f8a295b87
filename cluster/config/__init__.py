"""The configuration of a cluster: one YAML file, and what comes before and after it.

    default < file < environment < flag        the latter wins, key by key

    schema    the sections and keys, as pydantic models: types, ranges, help
    keys      every key, with the flag and the variable that are derived from it
    yaml_file a file, as values with the lines they stand on
    layers    one value of a key from each place, checked by itself
    strange   variables that are nearly a key's
    settle    the value that counts, then what values mean together
    show      the effective configuration as YAML, each value with where it is from
    assemble  settings of workers and routers, out of the configuration

Mistakes are collected on all of the way, and told at once (``mistakes``).
"""

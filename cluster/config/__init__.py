"""The configuration of a cluster: a YAML file, environment variables and flags.

    schema       sections and keys as pydantic models: default, help, check; keys that are gone
    keys         every key with its flag and variable, and the keys that each command takes
    yaml_file    a file as values with their lines
    resolve      the value that counts for each key, and every mistake
    consistency  contradictions between keys
    flags        the flags of a command
    assemble     settings of workers, routers, the autoscaler and a launch, made from it
    show_config  the effective configuration as YAML, each value with its origin

To add a key, declare it in ``schema``: flag, variable, help and JSON schema follow from there. Add
a field to the settings that need it (``engine.ipc.settings``, ``cluster.settings``,
``router.settings``), pass the value in ``assemble``, and list the key in deploy/baton.yaml. To
remove a key, add it to ``schema.REMOVED_KEYS``.
"""

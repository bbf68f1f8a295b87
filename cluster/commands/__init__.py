"""The commands of `baton`, a file each; `cluster.cli` lists them."""

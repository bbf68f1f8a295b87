"""All measurements that need a GPU, in one command: see ``bench.gpu.__main__``."""

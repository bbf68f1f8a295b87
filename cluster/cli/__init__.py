"""The command line `baton`; each command imports its heavy modules when it runs."""

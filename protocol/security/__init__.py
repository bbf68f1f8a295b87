"""How the processes of a cluster prove who they are, and on which hosts they may listen."""

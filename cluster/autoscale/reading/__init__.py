"""What the autoscaler knows, and where from: one Reading a turn.

lengths.py   histograms of tokens, points that stand for them    pure; the simulator
mix.py       what routers counted --> samples of requests         uses these three, too
sliding.py   the last looks --> Mix, Observed
fleet.py     records of workers --> Worker, Machine, pace, backlog; pure

scrape.py          requests counted on the routers' own pages     look.py: what both bring
prometheus_api.py  requests counted by a Prometheus
reader.py          the directory, and one of these two --> Reading (reading.py)
"""

"""What runs, and how well: from the metrics pages of all processes to one Overview.

pages.py     asks processes for their pages    fetch.py     whom a router lists (`baton status`)
figures.py   values and quantiles of pages     viewing.py   whom this router knows (`/ui`)
reading.py   a page that came                  past.py      what a window begins with
why.py       or did not                        window.py    what happened in it
pace.py      how often                         trust.py     certificates that this router shows
views.py     the Overview, of worker_view.py, router_view.py, speculation.py and verdict.py
"""

"""What runs, and how well: from the metrics pages of all processes to one Overview.

fetch.py        pages, of whom the router lists
figures.py      sums, rates and quantiles over them
views.py        the Overview; speculation.py: a decode worker's drafts in it
"""

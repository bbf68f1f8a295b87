"""A cluster on paper: discrete events around the product's own decisions.

    traffic --> router (router.choose, router.admission, router.learned, router.index)
                  |
                  v
    P: prompts, one after the other --KV over a link--> D: a batch that steps together
                  |
    every few seconds: a snapshot --cluster.sizing.policy.decide--> loans, starts, stops

    scenario.py, *_keys.py  what is simulated: one YAML file; given.py: and the command line
    machines.py, traffic.py devices and requests of a scenario
    clock.py, job.py        events in the order of time; one request
    worker.py, room.py, cache.py            a worker of either role, its pool of KV, prefixes
    steps.py, batch.py, prompts.py          its steps: who decodes together, prompts beside them
    network.py, carrier.py  links, and KV on its way over them
    books.py, routing.py    what routers know of loads, and the choice
    life.py, fleet.py       a request's way; workers that come, go and change
    scaling.py, faults.py   the autoscaler; what goes wrong, and when
    run.py, watching.py     all of it, and how it stands now and then
    result.py, show.py, page.py, replay.py                  what came of it; a log decided anew

Decoding costs no event for a token: between two changes of a batch its steps have a closed form.
Nothing here waits for a clock; a scenario with its seed gives the same result always.
"""

"""The live page, for those without Grafana.

    GET /ui             the page: nothing in it but what this package holds
    GET /ui/{file}      its style, script and icon
    GET /ui/overview    what it shows, as JSON (router/overview)

The page is open, like any login form; what it shows wants an API key where the server has some.
"""

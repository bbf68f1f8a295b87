"""Static files of the live page ``/ui``, served by ``router.http.ui_routes``."""

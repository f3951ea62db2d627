"""What people and their monitoring see of a server, over HTTP: health, metrics, an API, a page.

It runs in the event loop of the server, and needs the extra ``http`` of this distribution.
"""

from dflockd.http.app import HttpOptions, HttpServer

__all__ = ["HttpOptions", "HttpServer"]

"""The terminal's view of who holds what and who waits, over all servers; needs the extra ``top``.

`watch` shows it until it is told to stop; the command ``dflockd top`` and the plugin's
``celery dflock locks --watch`` are both made of it. Like the rest of the clients it only asks over
the wire. The screen is `rich`'s: widths of wide characters, terminals of few colours, resizing and
getting the terminal back as it was are all things that it has got right.
"""

from dflockd.top.screen import watch

__all__ = ["watch"]

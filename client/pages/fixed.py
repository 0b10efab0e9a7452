"""A page's fixed files, and the headers by which a browser takes no foreign code and no frame."""

from pathlib import Path

from aiohttp import web

CSP = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self';"
    " img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


def fixed_file(path: Path) -> web.Response:
    """The file as it is, with these headers."""
    return web.Response(
        text=path.read_text("utf-8"), content_type=KINDS[path.suffix], headers=HEADERS
    )

"""A page's fixed files, and the headers by which a browser takes no foreign code and no frame."""

from hashlib import sha256
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
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
SHARED = Path(__file__).parent / "static"
"""Files that all pages have: colours and controls, the mark, helpers of scripts."""


def page_files(folder: Path) -> dict[str, Path]:
    """By path: the styles, scripts and pictures in ``folder``, and those that all pages share."""
    found = [each for held in (SHARED, folder) for each in sorted(held.iterdir())]
    return {
        f"/static/{each.name}": each
        for each in found
        if each.suffix in KINDS and each.suffix != ".html"
    }


def fixed_file(path: Path, request: web.Request) -> web.Response:
    """The file with these headers, compressed; 304 where the browser has it already."""
    content = path.read_bytes()
    etag = sha256(content).hexdigest()[:32]
    headers = {**HEADERS, "Vary": "Accept-Encoding"}
    if any(each.value == etag for each in request.if_none_match or ()):
        response = web.Response(status=304, headers=headers)
    else:
        response = web.Response(
            body=content, content_type=KINDS[path.suffix], charset="utf-8", headers=headers
        )
        response.enable_compression()
    response.etag = etag
    return response

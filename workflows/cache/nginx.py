"""nginx as a cache server: WebDAV keeps what is PUT and serves it; its log says what was used."""

from __future__ import annotations

import base64
import hashlib
import os
import pwd
from pathlib import Path

from workflows import errors
from workflows.cache.settings import USER, Place, Settings, write_private

GREETING = "multimesh cache"
_CONFIGURATION = """\
{user}worker_processes 2;
daemon off;
pid "{root}/nginx.pid";
error_log "{log}" error;
events {{ worker_connections 512; }}
http {{
  log_format brief '$status $request_method $uri';
  access_log "{requests}" brief;
  server_tokens off;
  sendfile on;
  keepalive_timeout 300;
  keepalive_requests 100000;
  client_max_body_size 4g;
  client_body_temp_path "{scratch}/body";
  proxy_temp_path "{scratch}/proxy";
  fastcgi_temp_path "{scratch}/fastcgi";
  uwsgi_temp_path "{scratch}/uwsgi";
  scgi_temp_path "{scratch}/scgi";
  server {{
    listen {listen};
    location = /status {{ access_log off; default_type text/plain; return 200 "{greeting} {instance}\\n"; }}
    location ~ "^/(ac|cas)/[0-9a-f]{{64}}$" {{
{login}      root "{content}";
      dav_methods PUT;
      create_full_put_path on;
    }}
    location / {{ return 404; }}
  }}
}}
"""


def prepare(place: Place, settings: Settings, password: str | None, instance: str) -> Path:
    """Write the server's files and return its configuration; ``instance`` is what it answers on ``/status``."""
    login = ""
    if password is not None:
        write_private(place.root / "htpasswd", f"{USER}:{salted(password)}\n")
        login = f'      auth_basic "cache"; auth_basic_user_file "{place.root}/htpasswd";\n'
    # nginx takes the first line of the file for the user of its workers; only root may change it, others get a warning.
    user = f"user {pwd.getpwuid(0).pw_name};\n" if os.geteuid() == 0 else ""
    listen = f"[{settings.host}]:{settings.port}" if ":" in settings.host else f"{settings.host}:{settings.port}"
    text = _CONFIGURATION.format(
        user=user,
        root=place.root,
        log=place.log,
        requests=place.requests,
        scratch=place.scratch,
        content=place.content,
        listen=listen,
        greeting=GREETING,
        instance=instance,
        login=login,
    )
    path = place.root / "nginx.conf"
    path.write_text(text, encoding="utf-8")
    return path


def check_place(place: Place) -> None:
    """Raise for a folder whose name cannot be written in nginx's configuration."""
    if any(each in str(place.root) for each in '"\\;{}$\n'):
        raise errors.UsageError(f"--folder '{place.root}': nginx cannot have quotes, backslashes, $, ; or braces in it")


def salted(password: str) -> str:
    """Return a password as nginx checks it: salted SHA-1, the best that it does by itself on every system."""
    salt = os.urandom(8)
    digest = hashlib.sha1(password.encode() + salt, usedforsecurity=False).digest()
    return "{SSHA}" + base64.b64encode(digest + salt).decode()


def argv(place: Place, configuration: Path) -> list[str]:
    """Return the command of a server that ends when the process that started it does."""
    return [
        *("setpriv", "--pdeathsig", "TERM"),
        *("nginx", "-p", str(place.root), "-e", str(place.log), "-c", str(configuration)),
    ]

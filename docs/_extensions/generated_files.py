"""Pages and pictures that are generated before Sphinx reads them."""


def write(path, content):
    """Write a text or bytes, but only if they changed, so that Sphinx builds only what is new; return the path."""
    content = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
    return path


def remove_others(folder, pattern, written):
    """Remove the generated files of a folder that were not written, because what they showed no longer exists."""
    for path in folder.rglob(pattern):
        if path.is_file() and path not in written:
            path.unlink()

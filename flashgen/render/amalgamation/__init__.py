"""One self-contained file from a rendered template and its headers, without what the kernel does not reach."""

"""What commands print: reports, tables and JSON."""

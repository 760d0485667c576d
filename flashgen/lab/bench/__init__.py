"""Times of flashgen's algorithms beside those of other libraries."""

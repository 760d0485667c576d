"""torch's ``scaled_dot_product_attention``, computed by flashgen."""

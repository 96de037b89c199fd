"""What Headrace says about itself: metrics, and the slots they live in."""

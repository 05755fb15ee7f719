"""Numbers of few bits: their formats, and the scales that blocks of values share."""

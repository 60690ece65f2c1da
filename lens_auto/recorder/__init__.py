"""The flight log of a rank: fixed-size records in mapped segments, a live page, a thread that looks after both."""

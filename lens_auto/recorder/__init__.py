"""The flight log of a rank: fixed-size records in mapped segments, a live page, and the thread that looks after both."""

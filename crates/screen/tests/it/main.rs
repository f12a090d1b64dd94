//! Random programs on a screen, against the screen of a client that was attached all the time.

mod programs;

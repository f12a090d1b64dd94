//! Our programs against another implementation's: the suite is in `tests/`, and `interop/run` runs it.
//!
//! The counterpart is a released binary, installed from npm. The tests only run it and talk to it.

//! The exec-server wire protocol.

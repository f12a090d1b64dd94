//! The generated frame code is checked in; this proves that it is what the schema gives.
//!
//! Needs no `protoc`: `protox` compiles the schema. After a change of the schema, run
//! `UPDATE_PROTO=1 cargo test -p codex-exec-relay-core generated_code_matches_the_schema`.

use std::path::Path;

const SCHEMA: &str = "codex.exec_server.relay.v1.proto";
const GENERATED: &str = "codex.exec_server.relay.v1.rs";

#[test]
fn generated_code_matches_the_schema() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/proto");
    let descriptors = protox::compile([SCHEMA], [&dir]).unwrap();
    let package = prost_build::Module::from_protobuf_package_name("codex.exec_server.relay.v1");
    let files = descriptors.file.into_iter().map(|file| (package.clone(), file)).collect();
    let generated = prost_build::Config::new().bytes(["."]).generate(files).unwrap();
    let fresh = &generated[&package];

    let path = dir.join(GENERATED);
    if std::env::var_os("UPDATE_PROTO").is_some() {
        std::fs::write(&path, fresh).unwrap();
    }
    let checked_in = std::fs::read_to_string(&path).unwrap();
    assert!(
        checked_in == *fresh,
        "{GENERATED} is stale: run UPDATE_PROTO=1 cargo test -p codex-exec-relay-core"
    );
}

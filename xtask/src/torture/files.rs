//! Sandboxed file requests while helpers are killed: every request gets a response, a file holds one of the
//! contents written to it, and its directory holds nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, ensure};
use fastrand::Rng;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::Client;
use super::{MAX_KILLS, machine};

/// A directory that only the requests of one session write to.
#[derive(Debug)]
pub(crate) struct Workspace {
    directory: TempDir,
    /// What each file may hold, by its name; `None` is no file.
    files: BTreeMap<String, Vec<Option<Vec<u8>>>>,
    /// Hashes of each name with everything that was ever to be written to it.
    sent: BTreeSet<u64>,
}

/// A request, and what it may change.
struct FileRequest {
    method: &'static str,
    name: String,
    content: Option<Vec<u8>>,
}

impl Workspace {
    pub(crate) fn new() -> anyhow::Result<Self> {
        // Not in /tmp, which every such policy may write to.
        let directory = tempfile::tempdir_in("/var/tmp")?;
        Ok(Self { directory, files: BTreeMap::new(), sent: BTreeSet::new() })
    }

    /// Sends batches of requests until a whole batch succeeds after `calm` is set. Before that, requests may
    /// fail if `faulty`; after it, once per kill, if a dying helper had already accepted them.
    pub(crate) async fn torture(
        &mut self,
        url: &str,
        mut rng: Rng,
        faulty: bool,
        calm: Arc<AtomicBool>,
    ) -> anyhow::Result<()> {
        let mut client = Client::connect(url).await?;
        let mut spoiled = 0;
        for _ in 0..1_000_000 {
            let last = calm.load(Ordering::SeqCst);
            let may_fail = faulty && spoiled < MAX_KILLS;
            let failed = self.batch(&mut client, &mut rng, may_fail).await?;
            spoiled += usize::from(last && failed);
            if last && !failed {
                return Ok(());
            }
        }
        anyhow::bail!("no end of file requests")
    }

    /// Sends a few requests. Returns whether any failed with an internal error.
    async fn batch(
        &mut self,
        client: &mut Client,
        rng: &mut Rng,
        may_fail: bool,
    ) -> anyhow::Result<bool> {
        // Each request of a batch uses another file, so their order does not matter.
        let batch: Vec<FileRequest> =
            (0..rng.usize(1..8)).map(|n| random_request(rng, n)).collect();
        let requests = batch.iter().map(|request| (request.method, self.params(request))).collect();
        // Until its response arrives, each write may have happened.
        for request in batch.iter() {
            if let Some(content) = &request.content {
                self.sent.insert(hash(&request.name, content));
                self.possible(&request.name).push(request.content.clone());
            }
        }
        let responses = client.call_all(requests).await?;
        let failed =
            responses.iter().any(|response| response["error"]["data"]["kind"] == "internal");
        for (request, response) in batch.into_iter().zip(responses) {
            self.record(request, &response, may_fail)?;
        }
        Ok(failed)
    }

    fn params(&self, request: &FileRequest) -> Value {
        let uri = |path: &Path| format!("file://{}", path.display());
        let cwd = uri(self.directory.path());
        let sandbox = json!({"permissions": {"type": "workspace-write"}, "cwd": cwd});
        let path = uri(&self.directory.path().join(&request.name));
        match &request.content {
            Some(content) => json!({
                "path": path,
                "dataBase64": base64_simd::STANDARD.encode_to_string(content),
                "atomic": true,
                "sandbox": sandbox,
            }),
            None if request.method == "fs/readFile" => json!({"path": path, "sandbox": sandbox}),
            None => json!({"path": cwd, "sandbox": sandbox}),
        }
    }

    /// Checks a response against the possible contents.
    fn record(
        &mut self,
        request: FileRequest,
        response: &Value,
        may_fail: bool,
    ) -> anyhow::Result<()> {
        let FileRequest { method, name, content } = request;
        let failed = response.get("error").is_some();
        let possible = self.possible(&name);
        if content.is_some() {
            ensure!(may_fail || !failed, "{method} of {name}: {response}");
            if !failed {
                *possible = vec![content];
            }
        } else if method == "fs/readFile" {
            let may_be_missing = possible.contains(&None);
            ensure!(may_fail || may_be_missing || !failed, "{method} of {name}: {response}");
            if !failed {
                let read = response["result"]["dataBase64"].as_str().context("no data")?;
                let read = Some(base64_simd::STANDARD.decode_to_vec(read)?);
                ensure!(possible.contains(&read), "{name} holds what was never written to it");
                *possible = vec![read];
            }
        } else {
            ensure!(may_fail || !failed, "{method}: {response}");
        }
        Ok(())
    }

    /// What a file may hold.
    fn possible(&mut self, name: &str) -> &mut Vec<Option<Vec<u8>>> {
        self.files.entry(name.to_owned()).or_insert_with(|| vec![None])
    }

    /// Checks the directory after the end of the server.
    pub(crate) async fn check(&self) -> anyhow::Result<()> {
        let complaint = || self.check_directory().err();
        machine::wait_until_none(|| complaint().map(|error| format!("{error:#}"))).await
    }

    fn check_directory(&self) -> anyhow::Result<()> {
        for entry in std::fs::read_dir(self.directory.path())? {
            let name = entry?.file_name().into_string().unwrap_or_default();
            let content = std::fs::read(self.directory.path().join(&name))?;
            // A kill at the right moment leaves a complete temporary file of any write so far.
            let whole = name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".tmp"));
            if let Some((of, _)) = whole.and_then(|rest| rest.rsplit_once('.')) {
                ensure!(self.sent.contains(&hash(of, &content)), "{name} is not complete");
                continue;
            }
            let possible = self.files.get(&name);
            let possible = possible.with_context(|| format!("{name} is left behind"))?;
            ensure!(possible.contains(&Some(content)), "{name} holds what was never written to it");
        }
        for (name, possible) in &self.files {
            let there = self.directory.path().join(name).exists();
            ensure!(there || possible.contains(&None), "{name} has gone");
        }
        Ok(())
    }
}

fn hash(name: &str, content: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    (name, content).hash(&mut hasher);
    hasher.finish()
}

fn random_request(rng: &mut Rng, n: usize) -> FileRequest {
    let name = format!("f{n}");
    match rng.u8(..8) {
        0..4 => {
            let len = if rng.u8(..4) == 0 { rng.usize(..500_000) } else { rng.usize(..3000) };
            let byte = rng.u8(..);
            let mut content = vec![byte; len];
            content.iter_mut().take(16).for_each(|byte| *byte = rng.u8(..));
            FileRequest { method: "fs/writeFile", name, content: Some(content) }
        }
        4..7 => FileRequest { method: "fs/readFile", name, content: None },
        _ => FileRequest { method: "fs/readDirectory", name, content: None },
    }
}

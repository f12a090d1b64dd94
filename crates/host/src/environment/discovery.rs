//! The files of skills and plugins below a root: `capabilityRoots/discoverV1`.

use std::collections::BTreeMap;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::discovery::{
    CapabilityFile, DiscoveredRoot, PluginFiles, SkillFiles,
};
use codex_exec_server_protocol::files::{FsEntryKind, FsWalkOptions, FsWalkResponse};

use super::manifest::{self, APPS, Described, MCP_SERVERS, Member};
use super::reader::{Looked, Reader, is_missing, reason};
use crate::files::FileError;

/// The most roots of one request.
pub const MAX_ROOTS: usize = 128;
/// How many of them are searched at once.
pub const ROOTS_AT_ONCE: usize = 8;
/// What one answer carries of files, in bytes of JSON.
pub const MAX_ANSWER_BYTES: usize = 24 << 20;

/// What is returned of one root, in bytes of JSON.
const MAX_ROOT_BYTES: usize = 16 << 20;

const WALK: FsWalkOptions = FsWalkOptions {
    max_depth: 6,
    max_directories: 2_000,
    max_entries: 20_000,
    follow_directory_symlinks: true,
    prune_hidden_directories: false,
};

/// Searches a root. The answer lists what failed.
pub async fn discover_root(reader: &Reader, id: String, path: PathUri) -> DiscoveredRoot {
    let mut found = DiscoveredRoot::empty(id, path.clone());
    if let Err(error) = search(reader, &mut found).await {
        found = DiscoveredRoot::empty(found.id, path.clone());
        found.error = Some(match error {
            RootError::Unseen(error) => {
                format!("failed to inspect capability root {path}: {}", reason(&error))
            }
            RootError::NotADirectory => format!("capability root {path} is not a directory"),
            RootError::Walk(error) => {
                format!("failed to walk capability root {path}: {}", reason(&error))
            }
        });
    }
    found
}

/// Why a root cannot be searched.
#[derive(Debug)]
pub(super) enum RootError {
    Unseen(FileError),
    NotADirectory,
    Walk(FileError),
}

impl RootError {
    /// Whether there is nothing to be seen, or nothing that may be seen.
    pub(super) fn is_absence(&self) -> bool {
        match self {
            Self::Unseen(error) => is_missing(error) || matches!(error, FileError::Denied { .. }),
            Self::NotADirectory | Self::Walk(_) => false,
        }
    }
}

/// Searches the root at the path of `found`, and puts there what it finds.
pub(super) async fn search(reader: &Reader, found: &mut DiscoveredRoot) -> Result<(), RootError> {
    let root = found.path.clone();
    let metadata = reader.metadata(&root).await.map_err(RootError::Unseen)?;
    if !metadata.is_directory {
        return Err(RootError::NotADirectory);
    }
    let walked = reader.walk(&root, WALK).await.map_err(RootError::Walk)?;
    let mut search = Search { reader, found, room: MAX_ROOT_BYTES };
    search.run(&root, &walked).await;
    Ok(())
}

struct Search<'a> {
    reader: &'a Reader,
    found: &'a mut DiscoveredRoot,
    room: usize,
}

impl Search<'_> {
    async fn run(&mut self, root: &PathUri, walked: &FsWalkResponse) {
        if walked.truncated {
            let limits =
                format!("{} directories, {} entries", WALK.max_directories, WALK.max_entries);
            self.found.warnings.push(format!(
                "capability root {root} was searched only in part (limits: {limits})"
            ));
        }
        let own = self.first_manifest(root).await;
        if let Some(manifest) = &own {
            self.found.plugin = Some(self.plugin(root, manifest.clone()).await);
        }
        let above = match own {
            Some(own) => Some(own),
            None => self.manifest_above(root).await,
        };
        self.found.namespace_manifests.extend(above);
        let files = || walked.entries.iter().filter(|entry| entry.kind == FsEntryKind::File);
        self.nested_manifests(root, files().map(|entry| &entry.path)).await;
        let skills =
            files().map(|entry| &entry.path).filter(|path| path.file_name() == b"SKILL.md");
        self.skills(skills).await;
    }

    /// A file that may be missing; one that is skipped is warned of.
    async fn file(&mut self, path: &PathUri) -> Option<CapabilityFile> {
        match self.reader.text(path, &mut self.room).await {
            Looked::Found(file) => Some(file),
            Looked::Missing => None,
            Looked::Skipped(warning) => {
                self.found.warnings.push(warning);
                None
            }
        }
    }

    async fn file_below(&mut self, root: &PathUri, tail: &str) -> Option<CapabilityFile> {
        let path = root.join(tail).ok()?;
        self.file(&path).await
    }

    /// The preferred manifest of a plugin that can be read.
    async fn first_manifest(&mut self, root: &PathUri) -> Option<CapabilityFile> {
        for place in manifest::PLACES {
            if let Some(file) = self.file_below(root, place).await {
                return Some(file);
            }
        }
        None
    }

    /// That of the nearest plugin around the root.
    async fn manifest_above(&mut self, root: &PathUri) -> Option<CapabilityFile> {
        for ancestor in root.as_path().ancestors().skip(1) {
            let ancestor = PathUri::try_from(ancestor).ok()?;
            if let Some(file) = self.first_manifest(&ancestor).await {
                return Some(file);
            }
        }
        None
    }

    async fn plugin(&mut self, root: &PathUri, manifest: CapabilityFile) -> PluginFiles {
        let mcp_config = self.described(root, &manifest, MCP_SERVERS).await;
        let apps_config = self.described(root, &manifest, APPS).await;
        PluginFiles { manifest, mcp_config, apps_config }
    }

    async fn described(
        &mut self,
        root: &PathUri,
        manifest: &CapabilityFile,
        member: Member,
    ) -> Option<CapabilityFile> {
        let (described, warning) = manifest::described(manifest, member);
        self.found.warnings.extend(warning);
        match described? {
            Described::Named(path) => self.file_below(root, &path).await,
            Described::Default => self.file_below(root, member.default).await,
            Described::Inline(_) => None,
        }
    }

    /// One manifest for each plugin below the root.
    async fn nested_manifests<'w>(
        &mut self,
        root: &PathUri,
        files: impl Iterator<Item = &'w PathUri>,
    ) {
        let mut preferred: BTreeMap<PathUri, usize> = BTreeMap::new();
        for path in files.filter(|path| path.file_name() == b"plugin.json") {
            let Some(plugin) = manifest::plugin_root(path).filter(|plugin| plugin != root) else {
                continue;
            };
            let place = manifest::PLACES
                .iter()
                .position(|place| plugin.join(place).is_ok_and(|place| place == *path));
            if let Some(place) = place {
                let best = preferred.entry(plugin).or_insert(place);
                *best = place.min(*best);
            }
        }
        let mut manifests: Vec<PathUri> = preferred
            .into_iter()
            .filter_map(|(plugin, place)| plugin.join(manifest::PLACES[place]).ok())
            .collect();
        manifests.sort_by_cached_key(ToString::to_string);
        for path in manifests {
            let file = self.file(&path).await;
            self.found.namespace_manifests.extend(file);
        }
    }

    async fn skills<'w>(&mut self, paths: impl Iterator<Item = &'w PathUri>) {
        let mut paths: Vec<&PathUri> = paths.collect();
        paths.sort_by_cached_key(ToString::to_string);
        for path in paths {
            let Some(instructions) = self.file(path).await else { continue };
            let metadata = match path.join("../agents/openai.yaml") {
                Ok(path) => self.file(&path).await,
                Err(_) => None,
            };
            self.found.skills.push(SkillFiles { instructions, metadata });
        }
    }
}

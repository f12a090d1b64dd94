//! The skills and plugins that are installed here, described: `capabilities/discoverV2`.

use std::cmp::Ordering;
use std::collections::HashMap;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::discovery::{
    CapabilitiesDiscoverResponse, CapabilityFile, DiscoveredPlugin, DiscoveredRoot,
    DiscoveredSkill, DiscoveryRoot, SkillFiles,
};

use super::discovery::{RootError, search};
use super::manifest::Described;
use super::reader::Reader;
use super::{EnvironmentPlaces, manifest, skill};

/// The one warning for everything that could not be loaded.
const WARNING: &str = "some capability metadata could not be loaded; discovery may be incomplete";

/// The most plugins that are returned.
const MAX_PLUGINS: usize = 1_000;

/// The version that is preferred over any number: one that is being worked on.
const LOCAL: &str = "local";

/// Finds what is installed.
pub async fn discover_installed(
    places: &EnvironmentPlaces,
    reader: &Reader,
) -> CapabilitiesDiscoverResponse {
    let mut found = CapabilitiesDiscoverResponse::default();
    let codex_home = places.codex_home().ok();
    let roots = [
        ("codex-home-skills", codex_home.as_ref().map(|home| home.join("skills"))),
        ("user-agent-skills", places.user_home().map(|home| home.join(".agents/skills"))),
    ];
    for (id, path) in roots {
        if let Some(path) = path.and_then(|path| PathUri::try_from(path.as_path()).ok()) {
            skills_of_root(reader, id, path, &mut found).await;
        }
    }
    let cache = codex_home.and_then(|home| PathUri::try_from(home.as_path()).ok());
    if let Some(cache) = cache.and_then(|home| home.join("plugins/cache").ok()) {
        for installed in installed_plugins(reader, &cache).await {
            plugin(reader, installed, &mut found).await;
        }
    }
    found
}

async fn skills_of_root(
    reader: &Reader,
    id: &str,
    path: PathUri,
    found: &mut CapabilitiesDiscoverResponse,
) {
    let mut root = DiscoveredRoot::empty(id.to_owned(), path);
    if let Err(error) = search(reader, &mut root).await {
        return warn_of(&error, found);
    }
    let origin = DiscoveryRoot { id: root.id.clone(), path: root.path.clone() };
    let (skills, complete) = described(&root, Some(&origin));
    found.skills.extend(skills);
    if !complete {
        found.warnings.push(WARNING.to_owned());
    }
}

fn warn_of(error: &RootError, found: &mut CapabilitiesDiscoverResponse) {
    if !error.is_absence() {
        tracing::debug!(?error, "cannot search for capabilities");
        found.warnings.push(WARNING.to_owned());
    }
}

/// A version of a plugin that is installed.
struct Installed {
    /// `NAME@MARKETPLACE`.
    id: String,
    version: String,
    root: PathUri,
}

/// The newest version of every plugin, sorted by id. What cannot be looked at is not installed.
async fn installed_plugins(reader: &Reader, cache: &PathUri) -> Vec<Installed> {
    let mut plugins = Vec::new();
    for marketplace in directories(reader, cache).await {
        let Ok(path) = cache.join(&marketplace) else { continue };
        for name in directories(reader, &path).await {
            let Ok(path) = path.join(&name) else { continue };
            let version = newest(versions(reader, &path).await);
            if let Some((version, root)) =
                version.and_then(|version| Some((version.clone(), path.join(&version).ok()?)))
                && plugins.len() < MAX_PLUGINS
            {
                plugins.push(Installed { id: format!("{name}@{marketplace}"), version, root });
            }
        }
    }
    plugins.sort_by(|a, b| a.id.cmp(&b.id));
    plugins
}

/// The directories that may be names of marketplaces or plugins.
async fn directories(reader: &Reader, path: &PathUri) -> Vec<String> {
    let entries = reader.entries(path).await.unwrap_or_default();
    let named = |name: &str| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    let entries = entries.into_iter().filter(|entry| entry.is_directory);
    entries.map(|entry| entry.file_name).filter(|name| named(name)).collect()
}

/// The directories that may be versions; links are none.
async fn versions(reader: &Reader, path: &PathUri) -> Vec<String> {
    let named =
        |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b));
    let mut versions = Vec::new();
    for entry in reader.entries(path).await.unwrap_or_default() {
        if !entry.is_directory || !named(&entry.file_name) {
            continue;
        }
        let Ok(path) = path.join(&entry.file_name) else { continue };
        if reader.metadata(&path).await.is_ok_and(|metadata| !metadata.is_symlink) {
            versions.push(entry.file_name);
        }
    }
    versions
}

/// The version to use: the local one, or the highest.
fn newest(mut versions: Vec<String>) -> Option<String> {
    versions.sort();
    if versions.iter().any(|version| version == LOCAL) {
        return Some(LOCAL.to_owned());
    }
    versions.into_iter().max_by(|a, b| compare_versions(a, b))
}

/// By their numbers if both are semantic versions, else as text.
fn compare_versions(a: &str, b: &str) -> Ordering {
    match (SemanticVersion::parse(a), SemanticVersion::parse(b)) {
        (Some(one), Some(other)) => one.cmp(&other),
        _ => a.cmp(b),
    }
}

/// `MAJOR.MINOR.PATCH[-PRERELEASE][+BUILD]`, compared in this order.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct SemanticVersion<'v> {
    numbers: [u64; 3],
    is_release: bool,
    prerelease: Vec<Identifier<'v>>,
    build: Vec<Identifier<'v>>,
}

/// Numbers come before words.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Identifier<'v> {
    Number(u64),
    Word(&'v str),
}

impl<'v> SemanticVersion<'v> {
    fn parse(text: &'v str) -> Option<Self> {
        let (text, build) = match text.split_once('+') {
            Some((text, build)) => (text, identifiers(build)?),
            None => (text, Vec::new()),
        };
        let (numbers, prerelease) = match text.split_once('-') {
            Some((numbers, prerelease)) => (numbers, identifiers(prerelease)?),
            None => (text, Vec::new()),
        };
        let numbers: Vec<u64> = numbers.split('.').map(number).collect::<Option<_>>()?;
        let is_release = prerelease.is_empty();
        Some(Self { numbers: numbers.try_into().ok()?, is_release, prerelease, build })
    }
}

fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let plain = text == "0" || !text.starts_with('0');
    (digits && plain).then(|| text.parse().ok()).flatten()
}

fn identifiers(text: &str) -> Option<Vec<Identifier<'_>>> {
    let identifier = |text| match number(text) {
        Some(number) => Some(Identifier::Number(number)),
        None => (!str::is_empty(text)).then_some(Identifier::Word(text)),
    };
    text.split('.').map(identifier).collect()
}

async fn plugin(reader: &Reader, installed: Installed, found: &mut CapabilitiesDiscoverResponse) {
    let Installed { id, version, root } = installed;
    let mut contents = DiscoveredRoot::empty(id.clone(), root.clone());
    if let Err(error) = search(reader, &mut contents).await {
        return warn_of(&error, found);
    }
    let names = contents.plugin.as_ref().and_then(|plugin| manifest::names(&plugin.manifest));
    let (Some(names), Some(mut files)) = (names, contents.plugin.clone()) else {
        found.warnings.push(WARNING.to_owned());
        return;
    };
    let (skills, mut complete) = described(&contents, None);
    for (member, file) in
        [(manifest::MCP_SERVERS, &mut files.mcp_config), (manifest::APPS, &mut files.apps_config)]
    {
        match manifest::described(&files.manifest, member).0 {
            Some(Described::Inline(contents)) => {
                let path = files.manifest.path.clone();
                *file = Some(CapabilityFile { path, contents });
            }
            Some(Described::Named(_)) if file.is_none() => complete = false,
            _ => {}
        }
    }
    if !complete {
        found.warnings.push(WARNING.to_owned());
    }
    found.plugins.push(DiscoveredPlugin {
        id,
        display_name: names.display_name,
        remote_plugin_id: None,
        version,
        root,
        files,
        skills,
    });
}

/// The skills of a root, and whether that is all there is.
fn described(
    root: &DiscoveredRoot,
    origin: Option<&DiscoveryRoot>,
) -> (Vec<DiscoveredSkill>, bool) {
    let namespaces: HashMap<PathUri, String> = root
        .namespace_manifests
        .iter()
        .filter_map(|file| {
            Some((manifest::plugin_root(&file.path)?, manifest::names(file)?.namespace))
        })
        .collect();
    let mut complete = root.warnings.is_empty();
    let mut skills = Vec::new();
    for files in &root.skills {
        match described_skill(files, &namespaces, origin) {
            Ok(skill) => skills.push(skill),
            Err(error) => {
                tracing::debug!(%error, path = %files.instructions.path, "skipped a skill");
                complete = false;
            }
        }
    }
    (skills, complete)
}

fn described_skill(
    files: &SkillFiles,
    namespaces: &HashMap<PathUri, String>,
    origin: Option<&DiscoveryRoot>,
) -> Result<DiscoveredSkill, skill::SkillError> {
    let path = &files.instructions.path;
    let matter = skill::front_matter(&files.instructions.contents)?;
    let directory = path.as_path().parent().unwrap_or(path.as_path());
    let name = matter.name.unwrap_or_else(|| {
        directory.file_name().unwrap_or_default().to_string_lossy().into_owned()
    });
    let namespace = directory
        .ancestors()
        .filter_map(|ancestor| PathUri::try_from(ancestor).ok())
        .find_map(|ancestor| namespaces.get(&ancestor));
    let (dependencies, policy) =
        files.metadata.as_ref().map(|file| skill::metadata(&file.contents)).unwrap_or_default();
    Ok(DiscoveredSkill {
        name: namespace.map_or(name.clone(), |namespace| format!("{namespace}:{name}")),
        description: matter.description,
        short_description: matter.short_description,
        path: path.clone(),
        discovery_root: origin.cloned(),
        dependencies,
        policy,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_used() {
        for (versions, used) in [
            (&["1.0.0", "2.0.0"][..], "2.0.0"),
            (&["1.10.0", "1.9.0"], "1.10.0"),
            (&["1.0.0-beta", "1.0.0"], "1.0.0"),
            (&["1.0.0-2", "1.0.0-10"], "1.0.0-10"),
            (&["1.0.0-1", "1.0.0-a"], "1.0.0-a"),
            (&["1.0.0", "1.0.0+b"], "1.0.0+b"),
            (&["9.0.0", "local"], "local"),
            (&["abc", "1.0.0"], "abc"),
            (&["1.2", "1.10"], "1.2"),
            (&["v1.0.0", "2.0.0"], "v1.0.0"),
        ] {
            let versions = versions.iter().map(ToString::to_string).collect();
            assert_eq!(newest(versions).as_deref(), Some(used));
        }
        assert_eq!(newest(Vec::new()), None);
    }
}

//! The file with named places, `codex-exec/config.toml` in `$XDG_CONFIG_HOME` or `~/.config`.
//!
//! Invariants: a file that another user could have written is not read, since it decides where commands run
//! and which token goes there. An edit changes the text of one place and nothing else, comments included.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use codex_exec_server::credentials::{check_directory, check_file, create_new, home_dir};
use serde::Deserialize;

use crate::place::{Place, place};

/// The file, parsed.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlacesFile {
    #[serde(default)]
    pub places: BTreeMap<String, PlaceSettings>,
}

/// What the file says of one place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PlaceSettings {
    /// The server, as in `--on`.
    pub on: String,
    /// The file with its token.
    pub token_file: Option<PathBuf>,
    /// The registry of an environment.
    pub registry: Option<String>,
    /// The client's certificate and its key.
    pub client_cert: Option<PathBuf>,
    pub client_key: Option<PathBuf>,
    /// The directory that commands start in, and that relative paths start from.
    pub cwd: Option<String>,
    /// Variables of commands.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The default of `--sandbox`.
    pub sandbox: Option<String>,
}

/// The path of the file.
pub(crate) fn path() -> anyhow::Result<PathBuf> {
    let directory = directories().next().context("cannot find the file of places; set HOME")?;
    Ok(directory.join("config.toml"))
}

/// The directory of the file first, then the default one, which other commands of this user may use.
pub(crate) fn directories() -> impl Iterator<Item = PathBuf> {
    let named = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let named = named.filter(|path| path.is_absolute());
    let usual = home_dir().map(|home| home.join(".config"));
    named.into_iter().chain(usual).map(|config| config.join("codex-exec"))
}

/// Whether the text can name a place: letters, digits, `-` and `_`, so that it is never a URL, a path or a flag.
pub(crate) fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    !text.is_empty() && text.len() <= 64 && !text.starts_with('-') && text.chars().all(plain)
}

impl PlacesFile {
    /// Reads the file; without one, there are no places.
    pub(crate) fn read() -> anyhow::Result<Self> {
        let path = path()?;
        match text(&path)? {
            Some(text) => Self::parse(&text, &path),
            None => Ok(Self::default()),
        }
    }

    fn parse(text: &str, path: &Path) -> anyhow::Result<Self> {
        let mut file: Self =
            toml::from_str(text).with_context(|| format!("cannot parse {}", path.display()))?;
        for (name, settings) in &mut file.places {
            let invalid = || format!("places.{name} in {}", path.display());
            if !is_name(name) {
                bail!("{}: expected a name of letters, digits, - and _", invalid());
            }
            place(&settings.on)
                .map_err(anyhow::Error::msg)
                .with_context(|| format!("{}: invalid `on`", invalid()))?;
            if settings.client_cert.is_some() != settings.client_key.is_some() {
                bail!("{}: client_cert and client_key go together", invalid());
            }
            settings.resolve_paths(path.parent().unwrap_or(path));
        }
        Ok(file)
    }

    /// The place with this name; an error suggests the nearest one.
    pub(crate) fn find(&self, name: &str) -> anyhow::Result<&PlaceSettings> {
        if let Some(settings) = self.places.get(name) {
            return Ok(settings);
        }
        match nearest(name, self.places.keys()) {
            Some(near) => bail!("no place is named `{name}`; did you mean `{near}`?"),
            None if self.places.is_empty() => bail!(
                "no place is named `{name}`; add it with `codex places add {name} --on SERVER`, or pass \
                 ws://HOST:PORT, wss://HOST, unix:PATH, vsock:CID:PORT, stdio:COMMAND or env:ID"
            ),
            None => bail!("no place is named `{name}`; `codex places list` lists the names"),
        }
    }
}

impl PlaceSettings {
    /// The server.
    pub(crate) fn place(&self) -> Result<Place, String> {
        place(&self.on)
    }

    /// Paths are relative to the directory of the file; `~/` is the home directory.
    fn resolve_paths(&mut self, directory: &Path) {
        let files = [&mut self.token_file, &mut self.client_cert, &mut self.client_key];
        for file in files.into_iter().flatten() {
            *file = resolve(file, directory);
        }
        if let Some(sandbox) = &mut self.sandbox
            && !matches!(sandbox.as_str(), "read-only" | "workspace-write" | "none")
        {
            let file = resolve(Path::new(sandbox), directory);
            *sandbox = file.to_string_lossy().into_owned();
        }
    }

    /// The text of its section.
    pub(crate) fn to_text(&self, name: &str) -> String {
        let value = |text: &str| toml::Value::from(text).to_string();
        let mut out = format!("[places.{name}]\non = {}\n", value(&self.on));
        let path = |path: &PathBuf| path.to_string_lossy().into_owned();
        for (key, text) in [
            ("token_file", self.token_file.as_ref().map(path)),
            ("registry", self.registry.clone()),
            ("client_cert", self.client_cert.as_ref().map(path)),
            ("client_key", self.client_key.as_ref().map(path)),
            ("cwd", self.cwd.clone()),
            ("sandbox", self.sandbox.clone()),
        ] {
            if let Some(text) = text {
                out.push_str(&format!("{key} = {}\n", value(&text)));
            }
        }
        if !self.env.is_empty() {
            let pair =
                |(name, text): (&String, &String)| format!("{} = {}", value(name), value(text));
            let pairs: Vec<String> = self.env.iter().map(pair).collect();
            out.push_str(&format!("env = {{ {} }}\n", pairs.join(", ")));
        }
        out
    }
}

fn resolve(path: &Path, directory: &Path) -> PathBuf {
    match (path.strip_prefix("~"), home_dir()) {
        (Ok(below), Some(home)) => home.join(below),
        _ => directory.join(path),
    }
}

/// The name that was probably meant.
pub(crate) fn nearest<'a>(
    name: &str,
    names: impl IntoIterator<Item = &'a String>,
) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let near = names
        .into_iter()
        .map(|other| (strsim::damerau_levenshtein(&lower, &other.to_lowercase()), other.as_str()));
    let (distance, other) = near.min()?;
    // A third of the letters may be wrong.
    (distance <= name.chars().count().max(3) / 3).then_some(other)
}

/// The text of the file, unless others could have written it; `None` if there is none.
fn text(path: &Path) -> anyhow::Result<Option<String>> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    check_directory(path.parent().unwrap_or(path))?;
    check_file(path, &file)?;
    let mut text = String::new();
    file.read_to_string(&mut text).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some(text))
}

/// Adds a place to the file, or with `replace` replaces it.
pub(crate) fn add(name: &str, settings: &PlaceSettings, replace: bool) -> anyhow::Result<()> {
    let path = path()?;
    let mut before = text(&path)?.unwrap_or_default();
    if PlacesFile::parse(&before, &path)?.places.contains_key(name) {
        if !replace {
            bail!("the place `{name}` exists; add --replace to replace it");
        }
        before = without(&before, name, &path)?;
    }
    let separator = match before.as_str() {
        "" => "",
        text if text.ends_with("\n\n") => "",
        text if text.ends_with('\n') => "\n",
        _ => "\n\n",
    };
    let after = format!("{before}{separator}{}", settings.to_text(name));
    PlacesFile::parse(&after, &path)
        .with_context(|| format!("cannot add the place; edit {} by hand", path.display()))?;
    write(&path, &after)
}

/// Removes a place from the file.
pub(crate) fn remove(name: &str) -> anyhow::Result<()> {
    let path = path()?;
    let before = text(&path)?.unwrap_or_default();
    PlacesFile::parse(&before, &path)?.find(name)?;
    write(&path, &without(&before, name, &path)?)
}

/// The text without the sections of a place. Fails if they are not sections of their own.
fn without(text: &str, name: &str, path: &Path) -> anyhow::Result<String> {
    let mut out = String::new();
    let mut inside = false;
    for line in text.split_inclusive('\n') {
        if let Some(keys) = header(line) {
            inside = matches!(keys.as_slice(), [first, second, ..] if first == "places" && second == name);
        }
        if !inside {
            out.push_str(line);
        }
    }
    let by_hand = || format!("cannot remove the place; edit {} by hand", path.display());
    let parsed = |text: &str| -> anyhow::Result<toml::Table> {
        let mut table: toml::Table = toml::from_str(text).with_context(by_hand)?;
        // A header without places is the same as none.
        table.entry("places").or_insert_with(|| toml::Table::new().into());
        Ok(table)
    };
    let mut expected = parsed(text)?;
    if let Some(places) = expected.get_mut("places").and_then(toml::Value::as_table_mut) {
        places.remove(name);
    }
    if parsed(&out)? != expected {
        bail!(by_hand());
    }
    Ok(out)
}

/// The keys of a line that begins a table.
fn header(line: &str) -> Option<Vec<String>> {
    let line = line.trim_start();
    line.strip_prefix('[')?;
    let table: toml::Table = toml::from_str(line).ok()?;
    let mut keys = Vec::new();
    let mut inner = &table;
    while let Some((key, value)) = inner.iter().next() {
        keys.push(key.clone());
        match value {
            toml::Value::Table(below) => inner = below,
            _ => break,
        }
    }
    Some(keys)
}

/// Replaces the file atomically.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let failed = || format!("cannot write {}", path.display());
    // The target of a link, such as one into a repository of settings, not the link.
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let directory = path.parent().unwrap_or(&path);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).with_context(failed)?;
    check_directory(directory)?;
    let fresh = directory.join(format!(".config.toml.{}", std::process::id()));
    // Left by a process with the same id that was killed.
    let _ = fs::remove_file(&fresh);
    let written = create_new(&fresh)
        .and_then(|mut to| to.write_all(text.as_bytes()))
        .and_then(|()| fs::rename(&fresh, &path));
    if written.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    written.with_context(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> anyhow::Result<PlacesFile> {
        PlacesFile::parse(text, Path::new("/config/config.toml"))
    }

    #[test]
    fn a_place_has_settings_with_paths_below_the_file() {
        let file = parse(
            "[places.build]\non = \"ws://h:1\"\ntoken_file = \"t\"\ncwd = \"~/app\"\n\
             sandbox = \"policy.json\"\nenv = { A = \"1\" }\n",
        );
        let build = &file.unwrap().places["build"];
        assert_eq!(build.token_file.as_deref(), Some(Path::new("/config/t")));
        assert_eq!(build.sandbox.as_deref(), Some("/config/policy.json"));
        assert_eq!(build.cwd.as_deref(), Some("~/app"), "it is on the server");
        assert_eq!(build.env["A"], "1");
        for bad in [
            "[places.build]\n",
            "[places.build]\non = \"build\"\n",
            "[places.build]\non = \"ws://h\"\ntoken = \"secret\"\n",
            "[places.\"a b\"]\non = \"ws://h\"\n",
            "[places.a]\non = \"ws://h\"\nclient_cert = \"c\"\n",
            "[place.a]\non = \"ws://h\"\n",
        ] {
            parse(bad).unwrap_err();
        }
    }

    #[test]
    fn an_unknown_name_suggests_the_nearest() {
        let names = ["build", "laptop", "gpu"].map(str::to_owned);
        for (typed, meant) in [
            ("biuld", Some("build")),
            ("BUILD", Some("build")),
            ("lapto", Some("laptop")),
            ("gpi", Some("gpu")),
            ("staging", None),
            ("x", None),
        ] {
            assert_eq!(nearest(typed, &names), meant, "{typed}");
        }
    }

    /// Random files: an edit adds or removes one place, and every other line stays.
    #[test]
    fn edits_change_one_place_and_no_other_line() {
        let mut random = fastrand::Rng::with_seed(16);
        for round in 0..500 {
            let mut names: Vec<String> = (0..random.usize(1..6)).map(|n| format!("p{n}")).collect();
            random.shuffle(&mut names);
            let mut text = String::new();
            for name in &names {
                if random.bool() {
                    text.push_str("# a comment [places.p0]\n");
                }
                let settings = PlaceSettings {
                    on: "ws://h:1".to_owned(),
                    cwd: random.bool().then(|| "/a \"b\"\\n[places.p1]".to_owned()),
                    env: (0..random.usize(..3))
                        .map(|n| (format!("V{n}"), "x\ny".to_owned()))
                        .collect(),
                    ..PlaceSettings::default()
                };
                text.push_str(&settings.to_text(name));
                if settings.env.is_empty() && random.bool() {
                    text.push_str(&format!("[places.{name}.env]\nX = '''\n1\n'''\n"));
                }
                if random.bool() {
                    text.push('\n');
                }
            }
            let path = Path::new("/config/config.toml");
            let before = parse(&text).unwrap_or_else(|error| panic!("{round}: {error:#}\n{text}"));
            let name = random.choice(&names).unwrap();
            let shorter = without(&text, name, path).unwrap();
            let mut after = parse(&shorter).unwrap().places;
            assert!(!after.contains_key(name), "{round}");
            after.insert(name.clone(), before.places[name].clone());
            assert_eq!(after, before.places, "{round}");
            let kept: Vec<&str> = shorter.lines().collect();
            let mut lines = text.lines();
            assert!(
                kept.iter().all(|line| lines.any(|other| other == *line)),
                "{round}: {shorter}"
            );
        }
    }

    #[test]
    fn a_place_that_is_no_section_of_its_own_is_left_alone() {
        let path = Path::new("/config/config.toml");
        without("places = { a = { on = \"ws://h\" } }\n", "a", path).unwrap_err();
        without("[places]\na = { on = \"ws://h\" }\n", "a", path).unwrap_err();
    }
}

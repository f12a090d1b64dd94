//! Sources of AWS credentials and of the region: the environment, then the shared files.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_remote::Secret;

use super::sigv4::AwsKeys;
use crate::home::home_dir;

/// Settings of a profile for sources of credentials that are not supported.
const UNSUPPORTED_SETTINGS: [&str; 5] =
    ["role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file"];

/// Where to look for AWS credentials. `Debug` shows no secret.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct AwsSources {
    /// `--aws-profile`, else `AWS_PROFILE`; `None` means the profile `default`.
    pub profile: Option<String>,
    /// `--aws-region`, else `AWS_REGION`, else `AWS_DEFAULT_REGION`.
    pub region: Option<String>,
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`.
    pub keys: Option<AwsKeys>,
    /// `AWS_CONFIG_FILE`, else `~/.aws/config`.
    pub config_file: Option<PathBuf>,
    /// `AWS_SHARED_CREDENTIALS_FILE`, else `~/.aws/credentials`.
    pub credentials_file: Option<PathBuf>,
}

/// Why a request cannot be signed.
#[derive(Debug, thiserror::Error)]
pub enum AwsError {
    /// No source names a region.
    #[error(
        "no AWS region found; pass --aws-region, set AWS_REGION, or add `region` to the profile in \
         ~/.aws/config"
    )]
    NoRegion,
    /// No source has credentials.
    #[error(
        "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or add them to \
         the profile `{profile}` in ~/.aws/credentials"
    )]
    NoCredentials {
        /// The profile that was searched.
        profile: String,
    },
    /// The profile takes its credentials from a source that is not supported.
    #[error(
        "the AWS profile `{profile}` uses `{setting}`, which is not supported; export its \
         credentials with `aws configure export-credentials` and set them as variables"
    )]
    Unsupported {
        /// The profile.
        profile: String,
        /// The setting that names the source.
        setting: &'static str,
    },
    /// There is no such profile.
    #[error("the AWS profile `{0}` is in neither ~/.aws/config nor ~/.aws/credentials")]
    NoProfile(String),
    /// A file exists and cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The registry's URL would send signed requests unencrypted over the network.
    #[error("refusing to sign requests to {0}: it is neither https nor this machine")]
    InClear(String),
    /// The URL is invalid, or a key has characters that no header can carry.
    #[error("cannot sign the request: its URL or the AWS credentials contain invalid characters")]
    Unsignable,
}

impl AwsSources {
    /// Reads the environment of this process. Empty variables count as unset.
    pub fn from_env() -> Self {
        let home = home_dir();
        Self::from_lookup(|name| env::var_os(name), home.as_deref())
    }

    /// Reads the environment that `variable` looks up; `home` has the shared files.
    pub fn from_lookup(variable: impl Fn(&str) -> Option<OsString>, home: Option<&Path>) -> Self {
        let text = |name| {
            let text = variable(name)?.into_string().ok()?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        // A path may be any bytes.
        let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let keys = text("AWS_ACCESS_KEY_ID").zip(text("AWS_SECRET_ACCESS_KEY"));
        let file = |name, default: &str| {
            let usual = || home.map(|home| home.join(".aws").join(default));
            path(name).or_else(usual)
        };
        Self {
            profile: text("AWS_PROFILE"),
            region: text("AWS_REGION").or_else(|| text("AWS_DEFAULT_REGION")),
            keys: keys.map(|(access_key_id, secret)| AwsKeys {
                access_key_id,
                secret_access_key: secret.into(),
                session_token: text("AWS_SESSION_TOKEN").map(Secret::from),
            }),
            config_file: file("AWS_CONFIG_FILE", "config"),
            credentials_file: file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
        }
    }

    /// The variables with credentials.
    pub const VARIABLES: [&str; 3] =
        ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"];

    /// The files that may hold credentials: both of the shared ones.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.credentials_file.as_deref().into_iter().chain(self.config_file.as_deref())
    }

    /// The region to sign for.
    pub fn region(&self) -> Result<String, AwsError> {
        if let Some(region) = &self.region {
            return Ok(region.clone());
        }
        self.profile()?.remove("region").ok_or(AwsError::NoRegion)
    }

    /// The credentials as they are now.
    pub fn keys(&self) -> Result<AwsKeys, AwsError> {
        if let Some(keys) = &self.keys {
            return Ok(keys.clone());
        }
        let mut profile = self.profile()?;
        let keys = profile.remove("aws_access_key_id").zip(profile.remove("aws_secret_access_key"));
        if let Some((access_key_id, secret)) = keys {
            let session_token = profile.remove("aws_session_token").map(Secret::from);
            let secret_access_key = secret.into();
            return Ok(AwsKeys { access_key_id, secret_access_key, session_token });
        }
        let profile_name = self.profile_name().to_owned();
        for setting in UNSUPPORTED_SETTINGS {
            if profile.remove(setting).is_some() {
                return Err(AwsError::Unsupported { profile: profile_name, setting });
            }
        }
        Err(AwsError::NoCredentials { profile: profile_name })
    }

    fn profile_name(&self) -> &str {
        self.profile.as_deref().unwrap_or("default")
    }

    /// The settings of the profile; the credentials file takes precedence over the configuration file.
    fn profile(&self) -> Result<Settings, AwsError> {
        let name = self.profile_name();
        let credentials = read(self.credentials_file.as_deref())?;
        let config = read(self.config_file.as_deref())?;
        let mut settings = Settings::default();
        let mut found = settings.take(&credentials, |section| section == name);
        found |= settings.take(&config, |section| {
            let profile = section.strip_prefix("profile").filter(|r| r.starts_with([' ', '\t']));
            profile.is_some_and(|profile| profile.trim() == name)
                || section == "default" && name == "default"
        });
        if !found && self.profile.is_some() {
            return Err(AwsError::NoProfile(name.to_owned()));
        }
        Ok(settings)
    }
}

/// Settings by name; the first one of a name takes precedence.
#[derive(Default)]
struct Settings(Vec<(String, String)>);

impl Settings {
    /// Adds the settings of the sections that `matches` accepts. Returns whether there is one.
    fn take(&mut self, text: &str, matches: impl Fn(&str) -> bool) -> bool {
        let (mut within, mut found) = (false, false);
        for line in text.lines() {
            // Skip indented lines: they belong to nested settings.
            if line.starts_with([' ', '\t', '#', ';']) || line.is_empty() {
                continue;
            }
            if let Some(section) = line.strip_prefix('[') {
                let section = section.split(']').next().unwrap_or_default().trim();
                within = matches(section);
                found |= within;
            } else if within && let Some((name, value)) = line.split_once('=') {
                let comment = value.find(" #").or_else(|| value.find(" ;"));
                let value = value[..comment.unwrap_or(value.len())].trim();
                self.0.push((name.trim().to_ascii_lowercase(), value.to_owned()));
            }
        }
        found
    }

    fn remove(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(own, value)| own == name && !value.is_empty())?;
        Some(self.0.remove(at).1)
    }
}

/// The text of a file; empty if the file does not exist.
fn read(path: Option<&Path>) -> Result<String, AwsError> {
    let Some(path) = path else { return Ok(String::new()) };
    match fs::read_to_string(path) {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(source) => Err(AwsError::File { path: path.to_owned(), source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CREDENTIALS: &str = "\
# a comment
[default]
aws_access_key_id = AKDEFAULT
aws_secret_access_key = s3cret # of the default
[work]
aws_access_key_id=AKWORK
aws_secret_access_key=a=b
aws_session_token=tok
[empty]
";
    const CONFIG: &str = "\
[default]
region = eu-west-1
s3 =
  region = nested
[profile work]
region=us-west-2
aws_access_key_id=NOT-THIS-ONE
[profile role]
role_arn = arn:aws:iam::1:role/x
[profilewrong]
region = no
[wrong]
region = no
";

    fn sources(profile: Option<&str>) -> (tempfile::TempDir, AwsSources) {
        let home = tempfile::tempdir().unwrap();
        fs::create_dir(home.path().join(".aws")).unwrap();
        fs::write(home.path().join(".aws/credentials"), CREDENTIALS).unwrap();
        fs::write(home.path().join(".aws/config"), CONFIG).unwrap();
        let mut sources = AwsSources::from_lookup(|_| None, Some(home.path()));
        sources.profile = profile.map(str::to_owned);
        (home, sources)
    }

    #[test]
    fn profile_selects_region_and_keys_of_the_shared_files() {
        let (_home, default) = sources(None);
        assert_eq!(default.region().unwrap(), "eu-west-1");
        let keys = default.keys().unwrap();
        assert_eq!((&*keys.access_key_id, keys.session_token), ("AKDEFAULT", None));
        assert_eq!(keys.secret_access_key.expose(), "s3cret");

        let (_home, work) = sources(Some("work"));
        assert_eq!(work.region().unwrap(), "us-west-2");
        let keys = work.keys().unwrap();
        assert_eq!((&*keys.access_key_id, keys.secret_access_key.expose()), ("AKWORK", "a=b"));
        assert_eq!(keys.session_token.unwrap().expose(), "tok");

        for (name, expected) in [
            ("empty", "no AWS credentials"),
            ("role", "uses `role_arn`"),
            ("wrong", "is in neither"),
            ("none", "is in neither"),
        ] {
            let (_home, sources) = sources(Some(name));
            let error = sources.keys().unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
        let (_home, role) = sources(Some("role"));
        assert!(matches!(role.region(), Err(AwsError::NoRegion)));
    }

    #[test]
    fn environment_takes_precedence_and_rotated_files_are_read_again() {
        let (home, files) = sources(None);
        fs::write(home.path().join(".aws/credentials"), CREDENTIALS.replace("AKDEFAULT", "NEW"))
            .unwrap();
        assert_eq!(files.keys().unwrap().access_key_id, "NEW");
        let set = |name: &str| -> Option<OsString> {
            match name {
                "AWS_ACCESS_KEY_ID" => Some("AKENV".into()),
                "AWS_SECRET_ACCESS_KEY" => Some("hunter2".into()),
                "AWS_DEFAULT_REGION" => Some("ap-south-1".into()),
                _ => None,
            }
        };
        let sources = AwsSources::from_lookup(set, Some(home.path()));
        assert_eq!(sources.region().unwrap(), "ap-south-1");
        assert_eq!(sources.keys().unwrap().access_key_id, "AKENV");
        assert!(!format!("{sources:?}").contains("hunter2"));
        let both = |name: &str| set(name).or((name == "AWS_REGION").then(|| "sa-east-1".into()));
        assert_eq!(AwsSources::from_lookup(both, None).region().unwrap(), "sa-east-1");
        let nothing = AwsSources::from_lookup(|_| None, None);
        assert!(matches!(nothing.region(), Err(AwsError::NoRegion)));
        assert!(matches!(nothing.keys(), Err(AwsError::NoCredentials { .. })));
    }
}

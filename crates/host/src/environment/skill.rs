//! What a `SKILL.md` and the `agents/openai.yaml` beside it say.

use codex_exec_server_protocol::discovery::{SkillDependencies, SkillPolicy, SkillTool};

use super::yaml::{self, Node, Unfit, YamlError};

const MAX_NAME: usize = 64;
const MAX_WORD: usize = 64;
const MAX_TEXT: usize = 1024;

/// The front matter of a skill.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FrontMatter {
    /// None if the skill is named by its directory.
    pub name: Option<String>,
    pub description: String,
    pub short_description: Option<String>,
}

/// Why a file does not describe a skill.
#[derive(Debug, thiserror::Error)]
pub(super) enum SkillError {
    #[error("there is no front matter between lines of ---")]
    Missing,
    #[error(transparent)]
    Yaml(#[from] YamlError),
    #[error("a member has the wrong type: {0}")]
    Unfit(#[from] Unfit),
    #[error("there is no description")]
    NoDescription,
    #[error("the name is longer than {MAX_NAME} characters")]
    LongName,
}

/// Reads the front matter. Where it is no YAML because somebody wrote prose into it, words that would
/// need quotes are taken as if they had them.
pub(super) fn front_matter(contents: &str) -> Result<FrontMatter, SkillError> {
    let text = between_fences(contents).ok_or(SkillError::Missing)?;
    described(&text).or_else(|error| described(&quoted(&text)).map_err(|_| error))
}

fn between_fences(contents: &str) -> Option<String> {
    let mut lines = contents.lines();
    lines.next().filter(|line| line.trim() == "---")?;
    let mut text = String::new();
    for line in lines {
        if line.trim() == "---" {
            return Some(text);
        }
        text.push_str(line);
        text.push('\n');
    }
    None
}

fn described(text: &str) -> Result<FrontMatter, SkillError> {
    let matter = yaml::parse(text)?;
    let line = |node: &Node, name: &str| -> Result<Option<String>, Unfit> {
        let text = node.get(name)?.map(Node::text).transpose()?;
        Ok(text.map(one_line).filter(|text| !text.is_empty()))
    };
    let name = line(&matter, "name")?;
    if name.as_ref().is_some_and(|name| name.chars().count() > MAX_NAME) {
        return Err(SkillError::LongName);
    }
    let short_description = match matter.get("metadata")? {
        Some(metadata) => line(metadata, "short-description")?,
        None => None,
    };
    let description = line(&matter, "description")?.ok_or(SkillError::NoDescription)?;
    Ok(FrontMatter { name, description, short_description })
}

/// The same text with quotes around the values of `key: value` that YAML would take for something else.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 64);
    for line in text.lines() {
        match needs_quotes(line) {
            Some((key, value)) => {
                out.push_str(key);
                out.push_str(": '");
                out.push_str(&value.replace('\'', "''"));
                out.push_str("'\n");
            }
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    out
}

fn needs_quotes(line: &str) -> Option<(&str, &str)> {
    let (key, rest) = line.split_once(':')?;
    if key.trim_start().starts_with('#') || !rest.starts_with(char::is_whitespace) {
        return None;
    }
    let value = rest.trim();
    // A comment begins after a space.
    let value = value.find(" #").map_or(value, |comment| value[..comment].trim_end());
    let first = value.chars().next()?;
    let prose = value.contains(": ")
        || matches!(first, '[' | '{' | '@' | '`') && !yaml::is_well_formed(value);
    (prose && !matches!(first, '"' | '\'' | '|' | '>' | '#')).then_some((key, value))
}

/// Words with single spaces between them.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// What `agents/openai.yaml` says; nothing if it cannot be read.
pub(super) fn metadata(text: &str) -> (Option<SkillDependencies>, Option<SkillPolicy>) {
    let Ok(file) = yaml::parse(text) else { return (None, None) };
    let read = || -> Result<_, Unfit> {
        if let Some(interface) = file.get("interface")? {
            interface.members()?;
        }
        let dependencies = file.get("dependencies")?.map(dependencies).transpose()?.flatten();
        Ok((dependencies, file.get("policy")?.map(policy).transpose()?))
    };
    read().unwrap_or_default()
}

fn dependencies(node: &Node) -> Result<Option<SkillDependencies>, Unfit> {
    let mut tools = Vec::new();
    for tool in node.get("tools")?.map_or(Ok(&[][..]), Node::values)? {
        let text = |name: &str, most: usize| -> Result<Option<String>, Unfit> {
            let text = tool.get(name)?.map(Node::text).transpose()?.map(one_line);
            Ok(text.filter(|text| !text.is_empty() && text.chars().count() <= most))
        };
        let (kind, value) = (text("type", MAX_WORD)?, text("value", MAX_TEXT)?);
        let rest = SkillTool {
            description: text("description", MAX_TEXT)?,
            transport: text("transport", MAX_WORD)?,
            command: text("command", MAX_TEXT)?,
            url: text("url", MAX_TEXT)?,
            ..SkillTool::default()
        };
        if let (Some(kind), Some(value)) = (kind, value) {
            tools.push(SkillTool { kind, value, ..rest });
        }
    }
    Ok(Some(tools).filter(|tools| !tools.is_empty()).map(|tools| SkillDependencies { tools }))
}

fn policy(node: &Node) -> Result<SkillPolicy, Unfit> {
    let product = |node: &Node| match node.text()?.to_ascii_lowercase() {
        name if matches!(name.as_str(), "codex" | "chatgpt" | "atlas") => Ok(name),
        _ => Err(Unfit("an unknown product")),
    };
    Ok(SkillPolicy {
        allow_implicit_invocation: node
            .get("allow_implicit_invocation")?
            .map(Node::flag)
            .transpose()?,
        products: node
            .get("products")?
            .map_or(Ok(&[][..]), Node::values)?
            .iter()
            .map(product)
            .collect::<Result<_, _>>()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description(value: &str) -> Option<String> {
        let text = format!("---\nname: n\ndescription: {value}\n---\nbody\n");
        front_matter(&text).ok().map(|matter| matter.description)
    }

    #[test]
    fn prose_that_is_no_yaml_is_understood() {
        for (value, meant) in [
            ("use: this", Some("use: this")),
            ("foo: bar: baz \"x\"", Some("foo: bar: baz \"x\"")),
            ("a: b # c", Some("a: b")),
            ("it's: x", Some("it's: x")),
            ("@x", Some("@x")),
            ("[x] y", Some("[x] y")),
            ("{a: b}", Some("{a: b}")),
            ("[a, b]", None),
            ("{{x}}", None),
            ("{{x}} y", Some("{{x}} y")),
            ("\"a: b", None),
            ("%x", None),
            ("*x", None),
            ("| x: y", None),
            ("\"\"", None),
            ("~", None),
        ] {
            assert_eq!(description(value).as_deref(), meant, "{value}");
        }
    }

    #[test]
    fn front_matter_needs_its_fences() {
        let matter = "name: n\ndescription: d";
        for (text, valid) in [
            (format!("---\n{matter}\n---\n"), true),
            (format!(" --- \r\n{matter}\r\n--- \r\nbody"), true),
            (format!("---\n{matter}\n---"), true),
            (format!("\n---\n{matter}\n---\n"), false),
            (format!("\u{feff}---\n{matter}\n---\n"), false),
            (format!("---\n{matter}\n"), false),
            (format!("----\n{matter}\n----\n"), false),
        ] {
            assert_eq!(front_matter(&text).is_ok(), valid, "{text:?}");
        }
    }

    #[test]
    fn metadata_of_the_wrong_type_is_dropped_whole() {
        let (dependencies, policy) = metadata(
            "policy: {allow_implicit_invocation: false}\ndependencies: {tools: [{type: a, value: b}]}",
        );
        assert_eq!(dependencies.unwrap().tools[0].value, "b");
        assert_eq!(policy.unwrap().allow_implicit_invocation, Some(false));
        for text in ["policy: {products: [nope]}", "interface: 3\npolicy: {}", "policy: [", ""] {
            assert_eq!(metadata(text), (None, None), "{text}");
        }
    }
}

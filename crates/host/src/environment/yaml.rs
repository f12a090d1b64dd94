//! YAML as far as skills use it: scalars stay text.
//!
//! Invariant: a document costs no more than its bounds, whatever its aliases repeat.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle};

/// The most values of a document, those that aliases repeat included.
const MAX_NODES: usize = 65_536;
/// The deepest nesting.
const MAX_DEPTH: usize = 64;

/// A value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    Null,
    /// As it is written, and whether it is more than plain words.
    Scalar {
        text: String,
        quoted: bool,
    },
    List(Vec<Node>),
    /// In order, repeated keys included.
    Map(Vec<(String, Node)>),
}

/// Why a text is no document that we read.
#[derive(Debug, thiserror::Error)]
pub(super) enum YamlError {
    #[error(transparent)]
    Syntax(#[from] saphyr_parser::ScanError),
    #[error("the document is too large or too deep")]
    TooLarge,
    #[error("{0}")]
    Unexpected(&'static str),
}

/// Why a value is not what it has to be.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unfit(pub &'static str);

/// The one document of a text; an empty one is null.
pub(super) fn parse(text: &str) -> Result<Node, YamlError> {
    let mut loader = Loader { anchors: HashMap::new(), nodes: 0 };
    let mut parser = Parser::new_from_str(text);
    let mut document = None;
    while let Some(event) = parser.next_event() {
        match event?.0 {
            Event::StreamEnd => break,
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
            _ if document.is_some() => return Err(YamlError::Unexpected("more than one document")),
            event => document = Some(loader.node(event, &mut parser, 0)?.0),
        }
    }
    Ok(document.unwrap_or(Node::Null))
}

/// Whether a text is YAML, of whatever kind.
pub(super) fn is_well_formed(text: &str) -> bool {
    let mut parser = Parser::new_from_str(text);
    std::iter::from_fn(|| parser.next_event()).all(|event| event.is_ok())
}

struct Loader {
    /// With how many values each has.
    anchors: HashMap<usize, (Node, usize)>,
    nodes: usize,
}

impl Loader {
    /// The value that begins with this event, and of how many it consists.
    fn node<'t, I: saphyr_parser::Input>(
        &mut self,
        event: Event<'t>,
        parser: &mut Parser<'t, I>,
        depth: usize,
    ) -> Result<(Node, usize), YamlError> {
        if depth > MAX_DEPTH {
            return Err(YamlError::TooLarge);
        }
        let (node, anchor, size) = match event {
            Event::Alias(anchor) => {
                let (node, size) = self
                    .anchors
                    .get(&anchor)
                    .ok_or(YamlError::Unexpected("an alias inside of what it stands for"))?;
                // Before it is copied.
                self.nodes += size;
                if self.nodes > MAX_NODES {
                    return Err(YamlError::TooLarge);
                }
                return Ok((node.clone(), *size));
            }
            Event::Scalar(text, style, anchor, _tag) => {
                let quoted = style != ScalarStyle::Plain;
                let null = !quoted && matches!(&*text, "" | "~" | "null" | "Null" | "NULL");
                let scalar = || Node::Scalar { text: text.into_owned(), quoted };
                (if null { Node::Null } else { scalar() }, anchor, 1)
            }
            Event::SequenceStart(anchor, _tag) => {
                let (mut list, mut size) = (Vec::new(), 1);
                loop {
                    match next(parser)? {
                        Event::SequenceEnd => break,
                        event => {
                            let (node, of) = self.node(event, parser, depth + 1)?;
                            list.push(node);
                            size += of;
                        }
                    }
                }
                (Node::List(list), anchor, size)
            }
            Event::MappingStart(anchor, _tag) => {
                let (mut map, mut size) = (Vec::new(), 1);
                loop {
                    let key = match next(parser)? {
                        Event::MappingEnd => break,
                        event => self.node(event, parser, depth + 1)?,
                    };
                    let name = match key.0 {
                        Node::Scalar { text, .. } => text,
                        Node::Null => String::new(),
                        _ => return Err(YamlError::Unexpected("a key that is not a word")),
                    };
                    let event = next(parser)?;
                    let (value, of) = self.node(event, parser, depth + 1)?;
                    map.push((name, value));
                    size += key.1 + of;
                }
                (Node::Map(map), anchor, size)
            }
            _ => return Err(YamlError::Unexpected("a value is missing")),
        };
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(YamlError::TooLarge);
        }
        if anchor > 0 {
            self.nodes += size;
            self.anchors.insert(anchor, (node.clone(), size));
        }
        Ok((node, size))
    }
}

fn next<'t, I: saphyr_parser::Input>(parser: &mut Parser<'t, I>) -> Result<Event<'t>, YamlError> {
    match parser.next_event() {
        Some(event) => Ok(event?.0),
        None => Err(YamlError::Unexpected("the document ends too early")),
    }
}

impl Node {
    /// The members of a map; none of null.
    pub(super) fn members(&self) -> Result<&[(String, Node)], Unfit> {
        match self {
            Self::Map(members) => Ok(members),
            Self::Null => Ok(&[]),
            _ => Err(Unfit("not a map")),
        }
    }

    /// The values of a list; none of null.
    pub(super) fn values(&self) -> Result<&[Node], Unfit> {
        match self {
            Self::List(values) => Ok(values),
            Self::Null => Ok(&[]),
            _ => Err(Unfit("not a list")),
        }
    }

    /// A member of a map, which may be there once; null is as if it were not there.
    pub(super) fn get(&self, name: &str) -> Result<Option<&Node>, Unfit> {
        let mut found = self.members()?.iter().filter(|(key, _)| key == name);
        match (found.next(), found.next()) {
            (_, Some(_)) => Err(Unfit("a key is repeated")),
            (Some((_, Self::Null)) | None, None) => Ok(None),
            (Some((_, node)), None) => Ok(Some(node)),
        }
    }

    /// The text of a scalar.
    pub(super) fn text(&self) -> Result<&str, Unfit> {
        match self {
            Self::Scalar { text, .. } => Ok(text),
            _ => Err(Unfit("not a word")),
        }
    }

    /// A plain `true` or `false`.
    pub(super) fn flag(&self) -> Result<bool, Unfit> {
        match self {
            Self::Scalar { text, quoted: false } => match text.as_str() {
                "true" | "True" | "TRUE" => Ok(true),
                "false" | "False" | "FALSE" => Ok(false),
                _ => Err(Unfit("neither true nor false")),
            },
            _ => Err(Unfit("neither true nor false")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn scalars_stay_as_they_are_written() {
        let node = parse("a: 1.10\nb: 017\nc: yes\nd: \"~\"\ne: ~\nf: !!str 12\n").unwrap();
        for (name, text) in [("a", "1.10"), ("b", "017"), ("c", "yes"), ("d", "~"), ("f", "12")] {
            assert_eq!(node.get(name).unwrap().unwrap().text().unwrap(), text);
        }
        assert!(node.get("e").unwrap().is_none());
    }

    #[test]
    fn aliases_that_multiply_are_refused() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for n in 1..12 {
            let aliases = vec![format!("*a{}", n - 1); 10].join(", ");
            text += &format!("a{n}: &a{n} [{aliases}]\n");
        }
        assert!(matches!(parse(&text), Err(YamlError::TooLarge)));
        let deep = "[".repeat(100_000);
        assert!(parse(&deep).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "[-a-c:#&*!|>'\"{}\\[\\],?%@` \n\t]{0,80}") {
            let _ = parse(&text);
        }
    }
}

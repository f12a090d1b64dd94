//! A token that a parent process writes to stdin as one line, and the ChatGPT access token that comes that
//! way.
//!
//! Invariant: no error shows any of the line; a ChatGPT token makes no header before its account is known.

use std::io::{BufRead, Read};

use codex_exec_remote::{
    BaseUrl, Credential, CredentialError, CredentialFuture, HttpClient, Secret,
};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use zeroize::Zeroizing;

use crate::jwt::claims;
use crate::sign_in::ACCOUNT_ID;

/// The longest line with a ChatGPT access token, with its newline, in bytes.
const MAX_ACCESS_TOKEN_LINE: usize = 64 << 10;

/// Marks the requests of accounts that are subject to FedRAMP.
const FEDRAMP: HeaderName = HeaderName::from_static("x-openai-fedramp");

/// Why a token on stdin cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StdinTokenError {
    /// Stdin cannot be read.
    #[error("cannot read the token from stdin: {0}")]
    Read(#[source] std::io::Error),
    /// The line is too long, or stdin ended before the newline.
    #[error(
        "invalid token on stdin: expected one line of at most {} KiB that ends with a newline",
        .max >> 10
    )]
    Line {
        /// The longest line with its newline, in bytes.
        max: usize,
    },
    /// The line has other characters than visible ASCII.
    #[error("invalid token on stdin: expected visible ASCII characters without spaces")]
    Characters,
    /// The line is not a JSON Web Token.
    #[error("invalid ChatGPT access token on stdin: expected a JSON Web Token")]
    NotJwt,
    /// The account id is empty or has other characters than visible ASCII.
    #[error("invalid ChatGPT account id: expected visible ASCII characters without spaces")]
    AccountId,
    /// Neither the token nor the command line names an account.
    #[error("the ChatGPT access token names no account; add --chatgpt-account-id ID")]
    NoAccount,
    /// The token is for another account than the command line says.
    #[error("--chatgpt-account-id is not the account of the ChatGPT access token")]
    OtherAccount,
    /// The registry's URL would send the token unencrypted.
    #[error("refusing to send the ChatGPT access token to a registry without https")]
    InClear,
}

/// Reads one line of at most `max` bytes, with its newline, and returns it without.
pub fn read_token_line(input: &mut impl BufRead, max: usize) -> Result<Secret, StdinTokenError> {
    let mut line = Zeroizing::new(Vec::with_capacity(max));
    let read = input.take(max as u64).read_until(b'\n', &mut line);
    read.map_err(StdinTokenError::Read)?;
    if line.pop() != Some(b'\n') {
        return Err(StdinTokenError::Line { max });
    }
    line.pop_if(|last| *last == b'\r');
    match std::str::from_utf8(&line) {
        Ok(token) if is_visible(token) => Ok(token.into()),
        _ => Err(StdinTokenError::Characters),
    }
}

fn is_visible(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// A ChatGPT access token that is never renewed, and its account. `Debug` shows neither.
#[derive(Clone)]
pub struct ChatGptAccessToken {
    token: Secret,
    account_id: HeaderValue,
    fedramp: bool,
}

impl std::fmt::Debug for ChatGptAccessToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatGptAccessToken").finish_non_exhaustive()
    }
}

impl ChatGptAccessToken {
    /// Reads the token as one line. `account_id` has to be the account of the token if that names one.
    pub fn read(
        input: &mut impl BufRead,
        account_id: Option<&str>,
    ) -> Result<Self, StdinTokenError> {
        Self::new(read_token_line(input, MAX_ACCESS_TOKEN_LINE)?, account_id)
    }

    fn new(token: Secret, account_id: Option<&str>) -> Result<Self, StdinTokenError> {
        let claims = claims(&token).ok_or(StdinTokenError::NotJwt)?;
        let own = claims.chatgpt_account().ok_or(StdinTokenError::NotJwt)?;
        let account_id = match (own, account_id) {
            (Some(own), Some(given)) if own != given => return Err(StdinTokenError::OtherAccount),
            (Some(id), _) | (None, Some(id)) => id,
            (None, None) => return Err(StdinTokenError::NoAccount),
        };
        let value = Some(account_id).filter(|id| is_visible(id)).and_then(|id| id.parse().ok());
        let account_id = value.ok_or(StdinTokenError::AccountId)?;
        Ok(Self { token, account_id, fedramp: claims.is_fedramp() })
    }
}

impl Credential for ChatGptAccessToken {
    fn check_target(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        // Not even on this machine: another user may have the port.
        if base.is_https() {
            return Ok(());
        }
        Err(CredentialError::permanent(StdinTokenError::InClear))
    }

    fn headers<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async {
            let value = self.token.header("Bearer ");
            let value =
                value.ok_or_else(|| CredentialError::permanent(StdinTokenError::Characters))?;
            let mut headers = HeaderMap::from_iter([
                (header::AUTHORIZATION, value),
                (ACCOUNT_ID, self.account_id.clone()),
            ]);
            if self.fedramp {
                headers.insert(FEDRAMP, HeaderValue::from_static("true"));
            }
            Ok(headers)
        })
    }

    fn renew<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_of_stdin_is_the_token() {
        let longest = "x".repeat(99);
        for (input, token) in [
            ("tok-1\n".to_owned(), "tok-1"),
            ("tok-2\nmore".to_owned(), "tok-2"),
            ("tok\r\n".to_owned(), "tok"),
            (format!("{longest}\n"), longest.as_str()),
        ] {
            let read = read_token_line(&mut input.as_bytes(), 100).unwrap();
            assert_eq!(read.expose(), token);
        }
        for bad in ["", "\n", "k3y", " k3y \n", "k3y b\n", "k3y\u{e9}\n", &format!("x{longest}\n")]
        {
            let error = read_token_line(&mut bad.as_bytes(), 100).unwrap_err().to_string();
            assert!(!error.contains("k3y") && !error.contains("xxx"), "{error}");
        }
    }
}

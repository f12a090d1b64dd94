//! Sign-in with a browser: OAuth authorization code with PKCE, and a callback on this machine.
//!
//! Invariant: the callback's code is accepted only with the state of this sign-in, and only once.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use base64_simd::URL_SAFE_NO_PAD;
use codex_exec_remote::{HttpClient, encode_form};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use ring::digest::{SHA256, digest};
use subtle::ConstantTimeEq;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::{LoginError, SCOPE, random_text};
use crate::issuer::{IssuedTokens, Issuer};

/// The longest callback request, in bytes.
const MAX_REQUEST_BYTES: usize = 16 << 10;
/// Connections that may wait for their request at once.
const MAX_CONNECTIONS: usize = 32;
/// How long one callback request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the callback gave no code.
#[derive(Debug, thiserror::Error)]
pub enum CallbackError {
    /// The port cannot be used.
    #[error("cannot listen for the browser's redirect: {0}; choose another --port")]
    Listen(#[source] io::Error),
    /// The issuer denied the sign-in.
    #[error("the issuer refused the sign-in: {0}")]
    Denied(String),
}

/// A sign-in that waits for its browser.
#[derive(Debug)]
pub struct BrowserLogin {
    issuer: Issuer,
    listener: TcpListener,
    redirect: String,
    state: String,
    verifier: String,
}

impl BrowserLogin {
    /// Listens on this loopback port; 0 picks a free one.
    pub async fn start(issuer: Issuer, port: u16) -> Result<Self, LoginError> {
        let listener =
            TcpListener::bind(("127.0.0.1", port)).await.map_err(CallbackError::Listen)?;
        let port = listener.local_addr().map_err(CallbackError::Listen)?.port();
        let redirect = format!("http://localhost:{port}/auth/callback");
        Ok(Self { issuer, listener, redirect, state: random_text()?, verifier: random_text()? })
    }

    /// The URL for the user to open.
    pub fn url(&self) -> String {
        let challenge = URL_SAFE_NO_PAD.encode_to_string(digest(&SHA256, self.verifier.as_bytes()));
        let query = encode_form(&[
            ("response_type", "code".to_owned()),
            ("client_id", self.issuer.client_id.clone()),
            ("redirect_uri", self.redirect.clone()),
            ("scope", SCOPE.to_owned()),
            ("code_challenge", challenge),
            ("code_challenge_method", "S256".to_owned()),
            ("state", self.state.clone()),
        ]);
        format!("{}?{query}", self.issuer.authorize)
    }

    /// Waits for the browser's callback and exchanges its code for tokens.
    pub async fn finish(
        self,
        timeout: Duration,
        http: &HttpClient,
    ) -> Result<IssuedTokens, LoginError> {
        let code = tokio::time::timeout(timeout, self.code())
            .await
            .map_err(|_| LoginError::Timeout(timeout.as_secs()))??;
        let fields = vec![
            ("grant_type", "authorization_code".to_owned()),
            ("code", code),
            ("redirect_uri", self.redirect),
            ("code_verifier", self.verifier),
        ];
        Ok(self.issuer.tokens(fields, http).await?)
    }

    /// Waits for the callback with this sign-in's state; other requests get 404. Any program on this machine
    /// can connect, so no connection delays another: if too many are silent, the oldest is closed.
    async fn code(&self) -> Result<String, CallbackError> {
        let mut requests = FuturesUnordered::new();
        let mut oldest_first = VecDeque::new();
        loop {
            let (mut socket, outcome) = tokio::select! {
                accepted = self.listener.accept() => {
                    let (mut socket, _) = accepted.map_err(CallbackError::Listen)?;
                    if requests.len() >= MAX_CONNECTIONS {
                        drop(oldest_first.pop_front());
                    }
                    let (kept, closed) = oneshot::channel::<()>();
                    oldest_first.push_back(kept);
                    requests.push(async move {
                        let target = tokio::select! {
                            target = request_target(&mut socket) => target,
                            _ = closed => None,
                            () = tokio::time::sleep(REQUEST_TIMEOUT) => None,
                        };
                        (socket, target)
                    });
                    continue;
                }
                Some((socket, target)) = requests.next() => {
                    oldest_first.retain(|kept| !kept.is_closed());
                    (socket, target.and_then(|target| self.read(&target)))
                }
            };
            let (status, text) = match &outcome {
                Some(Ok(_)) => ("200 OK", "You are signed in. You can close this page.\n"),
                Some(Err(_)) => ("400 Bad Request", "The sign-in failed. See the terminal.\n"),
                None => ("404 Not Found", "Not found.\n"),
            };
            let response = format!(
                "HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
                text.len()
            );
            // Does not wait, even for a peer that does not read: the response fits into the socket's buffer.
            let _ = socket.write_all(response.as_bytes()).await;
            let _ = socket.shutdown().await;
            if let Some(result) = outcome {
                return result.map_err(CallbackError::Denied);
            }
        }
    }

    /// Reads a request: a code, a denial, or `None` for any other request.
    fn read(&self, target: &str) -> Option<Result<String, String>> {
        let (path, query) = target.split_once('?')?;
        let field = |name: &str| {
            let found = query.split('&').find_map(|pair| {
                let (key, value) = pair.split_once('=')?;
                (key == name).then_some(value)
            });
            found.and_then(unescape)
        };
        let state = field("state")?;
        let ours: bool = state.as_bytes().ct_eq(self.state.as_bytes()).into();
        if path != "/auth/callback" || !ours {
            return None;
        }
        if let Some(error) = field("error") {
            return Some(Err(error.chars().filter(|c| !c.is_control()).take(200).collect()));
        }
        field("code").map(Ok)
    }
}

/// Reads the head of a GET request and returns its target.
async fn request_target(socket: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() > MAX_REQUEST_BYTES || socket.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let text = String::from_utf8(head).ok()?;
    let mut words = text.split(' ');
    (words.next()? == "GET").then(|| words.next().map(ToOwned::to_owned))?
}

/// Decodes a form value; `None` if its escapes are invalid.
fn unescape(text: &str) -> Option<String> {
    let is_escape = |rest: &str| {
        rest.as_bytes().get(..2).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let text = text.replace('+', " ");
    let decoded = percent_encoding::percent_decode_str(&text).decode_utf8().ok()?;
    text.split('%').skip(1).all(is_escape).then(|| decoded.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn form_values_are_unescaped_or_rejected() {
        assert_eq!(unescape("a%2Fb+c").unwrap(), "a/b c");
        for bad in ["%", "%4", "%zz", "%ff"] {
            assert!(unescape(bad).is_none(), "{bad}");
        }
    }
}

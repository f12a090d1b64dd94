//! The handler of `http/request`: HTTP requests from the server's machine.
//!
//! Each request opens its own connection: HTTP/1.1, no cookies, through the proxies of the server's
//! environment. A streamed body is read only as fast as the client takes it. A request ends with the
//! client's connection.
//!
//! Invariant: no URL, header or body is logged, and errors name at most the host.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use codex_exec_host::files::Reservation;
use codex_exec_host::process::NEVER_INHERITED;
use codex_exec_rpc::{DialError, ExchangeError, HttpTarget, Outbound, Proxies};
use codex_exec_server_protocol::http::{
    HttpHeader, HttpRedirectPolicy, HttpRequestBodyDeltaNotification, HttpRequestParams,
    HttpRequestResponse,
};
use codex_exec_server_protocol::{Base64Bytes, ErrorKind, RpcError, encode, notification};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{
    ACCEPT, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, HOST, HeaderMap,
    HeaderName, HeaderValue, LOCATION, PROXY_AUTHORIZATION, REFERER, TRANSFER_ENCODING,
    WWW_AUTHENTICATE,
};
use hyper::{Method, Request, Response, StatusCode};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use url::Url;

use crate::config::ServerConfig;
use crate::connection;
use crate::response_memory::{ResponseMemory, is_small};

/// How many redirects one request follows.
const MAX_REDIRECTS: usize = 10;

/// Maximum bytes of a body in one notification.
const MAX_DELTA_BYTES: usize = 1 << 20;

/// Maximum bytes of a body in one response, so that the response fits into a message.
const MAX_BODY_BYTES: usize = 45 << 20;

/// Maximum bytes of a URL, that of a redirect included.
const MAX_URL_BYTES: usize = 64 << 10;

/// Maximum headers of a request.
const MAX_HEADERS: usize = 1_000;

/// Maximum bytes of all names and values of a request's headers.
const MAX_HEADER_BYTES: usize = 1 << 20;

/// Maximum bytes of the id of a streamed body, which each of its notifications repeats.
const MAX_REQUEST_ID_BYTES: usize = 4 << 10;

/// How long an exchange may take if the request sets no timeout.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Variables of the server that hold credentials; no header may use them. Compared without case.
const REFUSED_VARIABLES: &[&str] = &[
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_FEDERATED_TOKEN_FILE",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "OPENAI_API_KEY",
    "OPENAI_FEDERATION_RULE_ID",
    "OPENAI_IDENTITY_TOKEN_FILE",
    "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
];

/// The `http/request`s of one connection.
#[derive(Debug, Clone)]
pub(crate) struct Requests {
    /// Permits of this connection; a request without one waits.
    own: Arc<Semaphore>,
    /// Permits of the server; a request without one is refused.
    all: Arc<Semaphore>,
    /// Ids of the requests whose bodies are being streamed.
    streaming: Arc<Mutex<HashSet<String>>>,
}

/// A request id that stays in use until this is dropped.
struct StreamingId {
    requests: Requests,
    id: String,
}

impl Requests {
    /// The requests of a connection, with the permits of its server.
    pub(crate) fn new(config: &ServerConfig, all: Arc<Semaphore>) -> Self {
        let own = Arc::new(Semaphore::new(config.http_requests_per_connection));
        Self { own, all, streaming: Arc::default() }
    }

    /// Makes an HTTP request and sends its result as the response.
    pub(crate) fn call(
        &self,
        mut request: connection::Request,
        params: HttpRequestParams,
        response_memory: ResponseMemory,
    ) {
        let streaming = match params.stream_response.then(|| self.reserve(&params)).transpose() {
            Ok(streaming) => streaming,
            Err(error) => {
                return request.respond_without_waiting::<HttpRequestResponse>(Err(error));
            }
        };
        let (own, all) = (self.own.clone(), self.all.clone());
        tokio::spawn(async move {
            let outbound = request.outbound().clone();
            let work = async {
                let _own = own.acquire().await;
                let Ok(_one_of_all) = all.try_acquire() else {
                    drop(streaming);
                    let message = "http/request: too many requests are under way; try again later";
                    let busy = RpcError::internal(ErrorKind::Busy, message);
                    request.respond::<HttpRequestResponse>(Err(busy)).await;
                    return;
                };
                match streaming {
                    None => {
                        let mut memory = None;
                        let response = fetch_whole(params, &response_memory, &mut memory).await;
                        request.hold_memory(memory);
                        request.respond(response).await;
                    }
                    Some(streaming) => stream_response(request, params, streaming).await,
                }
            };
            tokio::select! {
                () = work => {}
                // The client has gone.
                () = outbound.closed() => {}
            }
        });
    }

    fn reserve(&self, params: &HttpRequestParams) -> Result<StreamingId, RpcError> {
        let id = params.request_id.clone();
        if id.len() > MAX_REQUEST_ID_BYTES {
            let message = format!(
                "http/request: requestId has {} bytes; at most {MAX_REQUEST_ID_BYTES} are allowed",
                id.len()
            );
            return Err(RpcError::invalid_params(ErrorKind::InvalidParams, message));
        }
        if !self.lock().insert(id.clone()) {
            let message = format!("http/request: requestId `{id}` is still streaming");
            return Err(RpcError::invalid_params(ErrorKind::IdInUse, message));
        }
        Ok(StreamingId { requests: self.clone(), id })
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<String>> {
        self.streaming.lock()
    }
}

impl Drop for StreamingId {
    fn drop(&mut self) {
        self.requests.lock().remove(&self.id);
    }
}

/// Makes the request and reads its whole body; reserves memory for a large one.
async fn fetch_whole(
    params: HttpRequestParams,
    response_memory: &ResponseMemory,
    memory: &mut Option<Reservation>,
) -> Result<HttpRequestResponse, RpcError> {
    let exchange = Exchange::prepare(params)?;
    let deadline = exchange.deadline;
    let mut response = exchange.run().await?;
    let mut body = BytesMut::new();
    while let Some(data) = next_data(&mut response, deadline).await.map_err(failed)? {
        if body.len() + data.len() > MAX_BODY_BYTES {
            let limit = MAX_BODY_BYTES >> 20;
            return Err(failed(format!("the body is larger than {limit} MiB; set streamResponse")));
        }
        if memory.is_none() && !is_small(body.len() + data.len()) {
            // A body without a length may be as long as any.
            let announced = response.body().size_hint().upper().unwrap_or(u64::MAX);
            let rest = announced.min((MAX_BODY_BYTES - body.len()) as u64);
            *memory = Some(response_memory.reserve(body.len() as u64 + rest).await);
        }
        body.extend_from_slice(&data);
    }
    Ok(rpc_response(&response, body.freeze()))
}

/// Makes the request and responds without the body, which follows in notifications.
async fn stream_response(
    request: connection::Request,
    params: HttpRequestParams,
    streaming: StreamingId,
) {
    let outbound = request.outbound().clone();
    let started = async {
        let exchange = Exchange::prepare(params)?;
        let deadline = exchange.deadline;
        Ok((exchange.run().await?, deadline))
    };
    let (mut response, deadline) = match started.await {
        Ok(started) => started,
        Err(error) => {
            drop(streaming);
            request.respond::<HttpRequestResponse>(Err(error)).await;
            return;
        }
    };
    if !request.respond(Ok(rpc_response(&response, Bytes::new()))).await {
        return;
    }
    let mut deltas = Deltas { outbound, request_id: streaming.id.clone(), seq: 0 };
    let error = loop {
        match next_data(&mut response, deadline).await {
            Ok(Some(mut data)) => {
                while !data.is_empty() {
                    let delta = data.split_to(data.len().min(MAX_DELTA_BYTES));
                    if !deltas.send(delta, false, None).await {
                        return;
                    }
                }
            }
            Ok(None) => break None,
            Err(error) => break Some(error),
        }
    };
    // After the last notification the client may reuse the id.
    drop(streaming);
    deltas.send(Bytes::new(), true, error).await;
}

/// Sends the notifications of one body.
struct Deltas {
    outbound: Outbound,
    request_id: String,
    seq: u64,
}

impl Deltas {
    async fn send(&mut self, delta: Bytes, done: bool, error: Option<String>) -> bool {
        self.seq += 1;
        let params = HttpRequestBodyDeltaNotification {
            request_id: self.request_id.clone(),
            seq: self.seq,
            delta: Base64Bytes(delta),
            done,
            error,
        };
        let message = encode::notification::<notification::HttpRequestBodyDelta>(&params);
        self.outbound.send(message).await.is_ok()
    }
}

fn rpc_response(response: &Response<Incoming>, body: Bytes) -> HttpRequestResponse {
    let headers = response.headers().iter().map(|(name, value)| HttpHeader {
        name: name.as_str().to_owned(),
        value: String::from_utf8_lossy(value.as_bytes()).into_owned(),
        value_env_var: None,
    });
    HttpRequestResponse {
        status: response.status().as_u16(),
        headers: headers.collect(),
        body: Base64Bytes(body),
    }
}

/// The next bytes of a body; `None` at its end.
async fn next_data(
    response: &mut Response<Incoming>,
    deadline: Instant,
) -> Result<Option<Bytes>, String> {
    loop {
        let frame = match timeout_at(deadline, response.body_mut().frame()).await {
            Err(_) => return Err("the body did not end in time".into()),
            Ok(None) => return Ok(None),
            Ok(Some(Err(error))) => return Err(format!("cannot read the body: {error}")),
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers are ignored.
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
}

/// An HTTP request that can be sent, and sent again to the target of a redirect.
struct Exchange {
    method: Method,
    url: Url,
    headers: HeaderMap,
    /// Headers with the value of a server variable: only the origin they were meant for gets them.
    from_variables: Vec<HeaderName>,
    body: Bytes,
    follow: bool,
    deadline: Instant,
}

impl Exchange {
    fn prepare(params: HttpRequestParams) -> Result<Self, RpcError> {
        let invalid = |message: String| {
            RpcError::invalid_params(ErrorKind::InvalidParams, format!("http/request {message}"))
        };
        let method = Method::from_bytes(params.method.as_bytes())
            .map_err(|error| invalid(format!("method is invalid: {error}")))?;
        if params.url.len() > MAX_URL_BYTES {
            let len = params.url.len();
            return Err(invalid(format!(
                "url has {len} bytes; at most {MAX_URL_BYTES} are allowed"
            )));
        }
        let url =
            Url::parse(&params.url).map_err(|error| invalid(format!("url is invalid: {error}")))?;
        check_scheme(&url).map_err(invalid)?;
        let timeout = params.timeout_ms.map_or(MAX_TIMEOUT, Duration::from_millis).min(MAX_TIMEOUT);
        let (headers, from_variables) = headers(&params.headers).map_err(invalid)?;
        Ok(Self {
            method,
            url,
            headers,
            from_variables,
            body: params.body.map(|body| body.0).unwrap_or_default(),
            follow: params.redirect_policy == HttpRedirectPolicy::Follow,
            deadline: Instant::now() + timeout,
        })
    }

    /// Sends the request and follows redirects; returns the response with its body unread.
    async fn run(mut self) -> Result<Response<Incoming>, RpcError> {
        for _ in 0..=MAX_REDIRECTS {
            let attempt = timeout_at(self.deadline, self.send_once());
            let response = match attempt.await {
                Ok(response) => response.map_err(failed)?,
                Err(_) => return Err(failed("no response in time")),
            };
            let location = response.headers().get(LOCATION);
            if !self.follow || !self.follow_redirect(response.status(), location).map_err(failed)? {
                return Ok(response);
            }
        }
        Err(failed("too many redirects"))
    }

    async fn send_once(&self) -> Result<Response<Incoming>, String> {
        let host = self.url.host_str().unwrap_or_default();
        let secure = self.url.scheme() == "https";
        let target = HttpTarget {
            secure,
            authority: &self.url[url::Position::BeforeHost..url::Position::AfterPort],
            connect_timeout: self.deadline.saturating_duration_since(Instant::now()),
            tls: None,
            proxies: Proxies::from_env(),
        };
        target.send(self.request()?).await.map_err(|error| match error {
            ExchangeError::Dial(error) => dial_failure(host, &error),
            ExchangeError::Http(error) => format!("the request to {host} failed: {error}"),
            error @ ExchangeError::Head => error.to_string(),
            ExchangeError::Uri => "the path is invalid".to_owned(),
        })
    }

    fn request(&self) -> Result<Request<Full<Bytes>>, String> {
        let mut request = Request::new(Full::from(self.body.clone()));
        *request.method_mut() = self.method.clone();
        let path = &self.url[url::Position::BeforePath..url::Position::AfterQuery];
        *request.uri_mut() = path.parse().map_err(|_| "the path is invalid".to_owned())?;
        let headers = request.headers_mut();
        *headers = self.headers.clone();
        headers.entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
        if !headers.contains_key(HOST) {
            let host = &self.url[url::Position::BeforeHost..url::Position::AfterPort];
            let host = HeaderValue::from_str(host)
                .map_err(|_| "the host is not a valid header value".to_owned())?;
            headers.insert(HOST, host);
        }
        Ok(request)
    }

    /// Becomes the request that a redirect asks for; false if the response is not a redirect.
    fn follow_redirect(
        &mut self,
        status: StatusCode,
        location: Option<&HeaderValue>,
    ) -> Result<bool, String> {
        let keeps_method = match status {
            StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND | StatusCode::SEE_OTHER => false,
            StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => true,
            _ => return Ok(false),
        };
        let Some(location) = location else { return Ok(false) };
        let location = location.to_str().ok().filter(|location| location.len() <= MAX_URL_BYTES);
        let next = location.and_then(|location| self.url.join(location).ok());
        let next = next.ok_or("a redirect has an invalid location")?;
        check_scheme(&next)?;
        if !keeps_method {
            if self.method != Method::HEAD {
                self.method = Method::GET;
            }
            self.body = Bytes::new();
            for header in [CONTENT_LENGTH, CONTENT_TYPE, CONTENT_ENCODING, TRANSFER_ENCODING] {
                self.headers.remove(header);
            }
        }
        if next.origin() != self.url.origin() {
            // Another host must not see the credentials.
            for credential in [AUTHORIZATION, COOKIE, PROXY_AUTHORIZATION, WWW_AUTHENTICATE] {
                self.headers.remove(credential);
            }
            for secret in self.from_variables.drain(..) {
                self.headers.remove(secret);
            }
        }
        self.headers.remove(HOST);
        let mut referer = self.url.clone();
        referer.set_fragment(None);
        // A query may hold a token.
        referer.set_query(None);
        let _ = referer.set_username("").and_then(|()| referer.set_password(None));
        // Also one that the client set, or that an earlier redirect did.
        self.headers.remove(REFERER);
        if !(self.url.scheme() == "https" && next.scheme() == "http")
            && let Ok(referer) = HeaderValue::from_str(referer.as_str())
        {
            self.headers.insert(REFERER, referer);
        }
        self.url = next;
        Ok(true)
    }
}

fn check_scheme(url: &Url) -> Result<(), String> {
    match url.scheme() {
        "http" | "https" => Ok(()),
        other => Err(format!("only supports http and https URLs, got {other}")),
    }
}

/// The headers, and the names of those that take their value from a variable.
fn headers(requested: &[HttpHeader]) -> Result<(HeaderMap, Vec<HeaderName>), String> {
    if requested.len() > MAX_HEADERS {
        let count = requested.len();
        return Err(format!("has {count} headers; at most {MAX_HEADERS} are allowed"));
    }
    let (mut headers, mut bytes) = (HeaderMap::new(), 0);
    let mut from_variables = Vec::new();
    for HttpHeader { name, value, value_env_var } in requested {
        let parsed = HeaderName::from_bytes(name.as_bytes())
            .map_err(|error| format!("header name is invalid: {error}"))?;
        let mut value = value.clone();
        if let Some(variable) = value_env_var {
            value.push_str(&env_value(name, variable)?);
            from_variables.push(parsed.clone());
        }
        bytes += name.len() + value.len();
        if bytes > MAX_HEADER_BYTES {
            return Err(format!("headers have more than {MAX_HEADER_BYTES} bytes"));
        }
        let mut value = HeaderValue::from_str(&value)
            .map_err(|error| format!("header value is invalid for {name}: {error}"))?;
        value.set_sensitive(true);
        headers.append(parsed, value);
    }
    Ok((headers, from_variables))
}

fn env_value(header: &str, variable: &str) -> Result<String, String> {
    let mut refused = REFUSED_VARIABLES.iter().chain(NEVER_INHERITED);
    if refused.any(|name| name.eq_ignore_ascii_case(variable)) {
        return Err(format!("header {header} cannot use the server's variable {variable}"));
    }
    match std::env::var(variable) {
        Ok(value) if value.is_empty() => {
            Err(format!("header {header} requires a non-empty server variable {variable}"))
        }
        Ok(value) => Ok(value),
        Err(_) => Err(format!("header {header} requires the server's variable {variable}")),
    }
}

fn dial_failure(host: &str, error: &DialError) -> String {
    match error {
        DialError::Resolve { source, .. } => format!("cannot resolve host {host}: {source}"),
        DialError::Tcp { address, source } => format!("cannot reach {address}: {source}"),
        DialError::Tls { source, .. } => format!("TLS with {host} failed: {source}"),
        DialError::Proxy { .. } => error.to_string(),
        _ => format!("cannot reach {host}"),
    }
}

fn failed(why: impl std::fmt::Display) -> RpcError {
    RpcError::internal(ErrorKind::HttpFailed, format!("http/request failed: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A location with a query that is a secret of its own, and the parts that make its origin.
    fn place(random: &mut fastrand::Rng, hop: usize) -> ((bool, usize, usize), String) {
        let (secure, host, port) = (random.bool(), random.usize(..2), random.usize(..3));
        let scheme = if secure { "https" } else { "http" };
        let host_text = ["a.example", "b.example"][host];
        // The default port, written or not, and another one.
        let default = if secure { ":443" } else { ":80" };
        let port_text = ["", default, ":8080"][port];
        let url = format!("{scheme}://{host_text}{port_text}/hop{hop}?key=query-secret-{hop}#f");
        ((secure, host, port / 2), url)
    }

    #[test]
    fn secrets_stay_at_the_first_origin_in_random_chains_of_redirects() {
        let mut random = fastrand::Rng::with_seed(5);
        let (mut kept, mut dropped) = (0, 0);
        for _ in 0..3_000 {
            let (first, url) = place(&mut random, 0);
            let mut headers = HeaderMap::new();
            for name in ["authorization", "cookie", "x-from-variable", "referer", "x-plain"] {
                headers.append(
                    HeaderName::from_static(name),
                    HeaderValue::from_str(&format!("secret of {name}")).unwrap(),
                );
            }
            let mut exchange = Exchange {
                method: Method::POST,
                url: url.parse().unwrap(),
                headers,
                from_variables: vec![HeaderName::from_static("x-from-variable")],
                body: Bytes::from_static(b"body"),
                follow: true,
                deadline: Instant::now(),
            };
            let mut same = true;
            let mut before = first;
            for hop in 1..random.usize(2..8) {
                let (next, mut location) = place(&mut random, hop);
                let next = match random.u32(..4) {
                    0 => {
                        location = format!("/hop{hop}?key=query-secret-{hop}");
                        before
                    }
                    _ => next,
                };
                let status = [301, 302, 303, 307, 308][random.usize(..5)];
                let status = StatusCode::from_u16(status).unwrap();
                let location = HeaderValue::from_str(&location).unwrap();
                assert!(exchange.follow_redirect(status, Some(&location)).unwrap());
                same &= next == first;
                let request = exchange.request().unwrap();
                for name in ["authorization", "cookie", "x-from-variable"] {
                    let has = request.headers().contains_key(name);
                    assert_eq!(has, same, "{name} at hop {hop}: {first:?} to {next:?}");
                }
                assert!(request.headers().contains_key("x-plain"));
                match request.headers().get(REFERER) {
                    Some(referer) => {
                        let referer = referer.to_str().unwrap();
                        assert!(!referer.contains("secret"), "{referer}");
                        assert!(referer.ends_with(&format!("/hop{}", hop - 1)), "{referer}");
                    }
                    None => assert!(before.0 && !next.0, "only a downgrade has no referer"),
                }
                *if same { &mut kept } else { &mut dropped } += 1;
                before = next;
            }
        }
        assert!(kept > 100 && dropped > 100, "{kept} {dropped}");
    }
}

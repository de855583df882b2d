BEGIN TRANSACTION;
CREATE TABLE chatkeep_activities (
    thread_no BIGINT NOT NULL, 
    position INTEGER NOT NULL, 
    body TEXT NOT NULL, 
    format SMALLINT NOT NULL, 
    PRIMARY KEY (thread_no, position), 
    FOREIGN KEY(thread_no) REFERENCES chatkeep_threads (thread_no) ON DELETE CASCADE
);
INSERT INTO "chatkeep_activities" VALUES(1,0,'{"id":"act","activityType":"plan","content":{"steps":["one"]},"index":0}',1);
CREATE TABLE chatkeep_alembic_version (
    version_num VARCHAR(32) NOT NULL, 
    CONSTRAINT chatkeep_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "chatkeep_alembic_version" VALUES('0002');
CREATE TABLE chatkeep_cuts (
    thread_no BIGINT NOT NULL, 
    cut BIGINT NOT NULL, 
    "after" BIGINT NOT NULL, 
    cut_at BIGINT NOT NULL, 
    run_id TEXT, 
    extra INTEGER NOT NULL, 
    format SMALLINT NOT NULL, 
    PRIMARY KEY (thread_no, cut), 
    FOREIGN KEY(thread_no) REFERENCES chatkeep_threads (thread_no) ON DELETE CASCADE
);
INSERT INTO "chatkeep_cuts" VALUES(1,4,1,1796064366244,'r2',1,1);
CREATE TABLE chatkeep_drafts (
    run_no BIGINT NOT NULL, 
    thread_no BIGINT NOT NULL, 
    updated_at BIGINT NOT NULL, 
    body TEXT NOT NULL, 
    format SMALLINT NOT NULL, 
    PRIMARY KEY (run_no), 
    FOREIGN KEY(run_no) REFERENCES chatkeep_runs (run_no) ON DELETE CASCADE, 
    FOREIGN KEY(thread_no) REFERENCES chatkeep_threads (thread_no) ON DELETE CASCADE
);
INSERT INTO "chatkeep_drafts" VALUES(1,1,1796064366212,'[{"id":"d","role":"assistant"}]',1);
CREATE TABLE chatkeep_entries (
    thread_no BIGINT NOT NULL, 
    number BIGINT NOT NULL, 
    message_id TEXT, 
    digest BLOB NOT NULL, 
    body TEXT NOT NULL, 
    cut BIGINT, 
    format SMALLINT NOT NULL, 
    PRIMARY KEY (thread_no, number), 
    FOREIGN KEY(thread_no) REFERENCES chatkeep_threads (thread_no) ON DELETE CASCADE
);
INSERT INTO "chatkeep_entries" VALUES(1,1,'u1',X'B1352BF462483E8544303099EE6CC5A0','{"id":"u1","role":"user","content":"café 😀 \u0000 \"quoted\"\n"}',NULL,1);
INSERT INTO "chatkeep_entries" VALUES(1,2,'a1',X'860D8988A480B8FF1258E6DD165431C1',' {"id":"a1","role":"assistant","content":null,"toolCalls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}],"unknownKey":{"z":1,"a":[1.0,1,-0.0,"",[],{}]},"big":12345678901234567890123}',4,1);
INSERT INTO "chatkeep_entries" VALUES(1,3,NULL,X'B8350BE2B1B3415D799E10310D93E47B','{"role":"tool","toolCallId":"c","content":"no id"}',4,1);
INSERT INTO "chatkeep_entries" VALUES(1,4,'a2',X'845CD3C29B1CB84A5BD9F5B9962D795C','{"id":"a2","role":"assistant","content":"new"}',NULL,1);
INSERT INTO "chatkeep_entries" VALUES(1,5,'late',X'3D1165D34B50145378A2039CA64039DB','{"id":"late","role":"assistant"}',4,1);
CREATE TABLE chatkeep_interrupts (
    sequence INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
    thread_no BIGINT NOT NULL, 
    "key" BLOB NOT NULL, 
    run_id TEXT NOT NULL, 
    interrupt_id TEXT NOT NULL, 
    status TEXT NOT NULL, 
    requested_at BIGINT NOT NULL, 
    resolved_at BIGINT, 
    claimed_by TEXT, 
    payload TEXT NOT NULL, 
    response TEXT, 
    extra TEXT, 
    format SMALLINT NOT NULL, 
    FOREIGN KEY(thread_no) REFERENCES chatkeep_threads (thread_no) ON DELETE CASCADE
);
INSERT INTO "chatkeep_interrupts" VALUES(1,1,X'D2E9381014F40E22D1F117DBAE1FCF73387CFA02AB4A4474C2692CFACFA4DB9C','r1','i1','resolved',1700000000001,1796064366264,NULL,'{"kind":"approval","n":[1,2.5]}','null','{"custom":{"kept":true}}',1);
CREATE TABLE chatkeep_locks (
    "key" BLOB NOT NULL, 
    tenant_id TEXT NOT NULL, 
    user_id TEXT NOT NULL, 
    name TEXT NOT NULL, 
    token TEXT NOT NULL, 
    fence BIGINT NOT NULL, 
    lease_until BIGINT NOT NULL, 
    format SMALLINT NOT NULL, 
    PRIMARY KEY ("key")
);
INSERT INTO "chatkeep_locks" VALUES(X'6770526E871A3E8AAE9AD5111B5A81962EC8DE9E6DF1E4F44A7B18FE68EC225F','acme','ann','a lock','token',1796064366316,1796064426316,1);
CREATE TABLE chatkeep_log_events (
    log_no BIGINT NOT NULL, 
    number BIGINT NOT NULL, 
    body TEXT NOT NULL, 
    format SMALLINT NOT NULL, 
    PRIMARY KEY (log_no, number), 
    FOREIGN KEY(log_no) REFERENCES chatkeep_logs (log_no) ON DELETE CASCADE
);
INSERT INTO "chatkeep_log_events" VALUES(1,3,'{"type":"RUN_FINISHED"}',1);
INSERT INTO "chatkeep_log_events" VALUES(1,4,'{"type":"CUSTOM","value":"café \u0000"}',1);
INSERT INTO "chatkeep_log_events" VALUES(2,1,'{"type":"RUN_FINISHED"}',1);
CREATE TABLE chatkeep_logs (
    log_no INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
    "key" BLOB NOT NULL, 
    thread_key BLOB NOT NULL, 
    tenant_id TEXT NOT NULL, 
    user_id TEXT NOT NULL, 
    thread_id TEXT NOT NULL, 
    run_id TEXT NOT NULL, 
    incarnation TEXT NOT NULL, 
    epoch BIGINT NOT NULL, 
    token TEXT NOT NULL, 
    first_number BIGINT NOT NULL, 
    next_number BIGINT NOT NULL, 
    lease_until BIGINT NOT NULL, 
    closed_at BIGINT, 
    format SMALLINT NOT NULL
);
INSERT INTO "chatkeep_logs" VALUES(1,X'80792503B2D449B88F85AD560B6FC739E4CAA575A54BD59934D9B8D73EDCB064',X'F81D49A8CE19BCA4248E449433802C25B2D1DB04646AA334FEB75ECEEC5BEC05','acme','ann','thread 1','r1','9c6d26f3',2,'token 2',3,5,1796064426289,NULL,1);
INSERT INTO "chatkeep_logs" VALUES(2,X'E5246DF54EF3C9EBB66C40C2019F83B5958F910732EB17910C0F6FF576BF8A8F',X'F81D49A8CE19BCA4248E449433802C25B2D1DB04646AA334FEB75ECEEC5BEC05','acme','ann','thread 1','r2','d6d77af3',1,'token',1,2,1796064426302,1796064366312,1);
CREATE TABLE chatkeep_metadata (
    key_digest BLOB NOT NULL, 
    owner_key BLOB NOT NULL, 
    tenant_id TEXT NOT NULL, 
    user_id TEXT NOT NULL, 
    namespace TEXT NOT NULL, 
    "key" TEXT NOT NULL, 
    revision TEXT NOT NULL, 
    value TEXT NOT NULL, 
    format SMALLINT NOT NULL, 
    PRIMARY KEY (key_digest)
);
INSERT INTO "chatkeep_metadata" VALUES(X'3B539406096374BE3EA507D47E85130E61C39887F33808568E38A9755A2147A8',X'E7CB8B96BE69FC8B8F4FA5CB4EC0F578FA46F871F9BAE67CAF4038F01780CD18','acme','ann','space','thread 1','c2627689a5ba62e280610717','{"k":[null,true]}',1);
CREATE TABLE chatkeep_runs (
    run_no INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
    "key" BLOB NOT NULL, 
    thread_no BIGINT NOT NULL, 
    run_id TEXT NOT NULL, 
    status TEXT NOT NULL, 
    started_at BIGINT NOT NULL, 
    finished_at BIGINT, 
    parent_key BLOB, 
    parent_run_id TEXT, 
    subagent_run_id TEXT, 
    name TEXT, 
    lease_token TEXT, 
    lease_until BIGINT, 
    hide_from BIGINT, 
    detached_since BIGINT, 
    cancel_requested BOOLEAN, 
    error_code TEXT, 
    error TEXT, 
    usage TEXT, 
    extra TEXT, 
    format SMALLINT NOT NULL, 
    FOREIGN KEY(thread_no) REFERENCES chatkeep_threads (thread_no) ON DELETE CASCADE
);
INSERT INTO "chatkeep_runs" VALUES(1,X'6D026ECBF481B1DD1EB1AED4078E300FD75808CE2BF9DD4DCA5AD5E5E08BBE7D',1,'r1','interrupted',1700000000000,NULL,X'3F05508ADBA030F75BEDAA61C60103ABF4AE0F0EA8CE575664A147381D6FDF5D','r0','s0','agent','token',1796064396193,NULL,NULL,0,NULL,NULL,'{"totalTokens":3}','{"detached":true,"mine":[1]}',1);
INSERT INTO "chatkeep_runs" VALUES(2,X'315B09046E1295AF2DE684C30549252F35BDBB3A6451106F14DED77247294C45',1,'r2','failed',1700000000002,9,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'e','{"message":"no","code":"e"}',NULL,NULL,1);
CREATE TABLE chatkeep_threads (
    thread_no INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
    "key" BLOB NOT NULL, 
    owner_key BLOB NOT NULL, 
    tenant_id TEXT NOT NULL, 
    user_id TEXT NOT NULL, 
    thread_id TEXT NOT NULL, 
    child BOOLEAN NOT NULL, 
    incarnation TEXT NOT NULL, 
    version BIGINT NOT NULL, 
    transcript_version BIGINT NOT NULL, 
    next_number BIGINT NOT NULL, 
    newest BIGINT NOT NULL, 
    message_count BIGINT NOT NULL, 
    commits TEXT NOT NULL, 
    created_at BIGINT NOT NULL, 
    updated_at BIGINT NOT NULL, 
    format SMALLINT NOT NULL
);
INSERT INTO "chatkeep_threads" VALUES(1,X'F81D49A8CE19BCA4248E449433802C25B2D1DB04646AA334FEB75ECEEC5BEC05',X'7BF811B15151FA6FCCEF67F71989080C4C17875D2B45B6877E416722345F2863','acme','ann','thread 1',0,'bc4dacd0e50b31d2',7,4,6,4,2,'nGd8XgT7W3gf 7 - 0 3 4
BWKa3wdR7NWO 6 - 0 2 4
Ae75xGQ3jgTd 5 - 0 1 4
5UbXe0vJGNYw 4 4-4 2
brpOJVNgniTZ 3 - 1 2 3
JQ6KBIli_iks 2 - 0 1 3
c6J0UsOcyfMA 1 1-3 1',1796064366193,1796064366264,1);
CREATE UNIQUE INDEX uq_chatkeep_threads_key ON chatkeep_threads ("key");
CREATE INDEX ix_chatkeep_threads_owner ON chatkeep_threads (owner_key, updated_at, thread_no);
CREATE INDEX ix_chatkeep_cuts_age ON chatkeep_cuts (cut_at);
CREATE UNIQUE INDEX uq_chatkeep_runs_key ON chatkeep_runs ("key");
CREATE INDEX ix_chatkeep_runs_thread ON chatkeep_runs (thread_no);
CREATE INDEX ix_chatkeep_runs_parent ON chatkeep_runs (parent_key) WHERE parent_key is not null;
CREATE INDEX ix_chatkeep_runs_running ON chatkeep_runs (run_no) WHERE status = 'running';
CREATE INDEX ix_chatkeep_drafts_thread ON chatkeep_drafts (thread_no);
CREATE UNIQUE INDEX uq_chatkeep_interrupts_key ON chatkeep_interrupts (thread_no, "key");
CREATE INDEX ix_chatkeep_metadata_owner ON chatkeep_metadata (owner_key);
CREATE UNIQUE INDEX uq_chatkeep_logs_key ON chatkeep_logs ("key");
CREATE INDEX ix_chatkeep_logs_thread ON chatkeep_logs (thread_key);
CREATE INDEX ix_chatkeep_logs_open ON chatkeep_logs (log_no) WHERE closed_at is null;
CREATE INDEX ix_chatkeep_logs_closed ON chatkeep_logs (closed_at) WHERE closed_at is not null;
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('chatkeep_threads',1);
INSERT INTO "sqlite_sequence" VALUES('chatkeep_runs',2);
INSERT INTO "sqlite_sequence" VALUES('chatkeep_interrupts',1);
INSERT INTO "sqlite_sequence" VALUES('chatkeep_logs',2);
COMMIT;

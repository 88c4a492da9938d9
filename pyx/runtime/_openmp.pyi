VERSION: int
DESCRIPTION: str

def last_team_size() -> int: ...

"""`python -m services.batcher`"""

from paceline.service import main
from services.batcher.batcher import body

if __name__ == "__main__":
    main("batcher", body)
